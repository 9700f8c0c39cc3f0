// Writes each dashboard, and its panels' options, into a TypeScript file as values of the types that Grafana generates
// from its schema, and has them checked: unknown keys, wrong types and values outside an enumeration are errors. What the
// schema leaves open (a panel's queries) is checked by integration-tests/tests/dashboards.rs.
//
// npm ci && node check.mjs [FOLDER OF THE DASHBOARDS]
import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const dashboards = process.argv[2] ?? dirname(here);
const panels = { timeseries: "TimeSeries", stat: "Stat", table: "Table", heatmap: "Heatmap" };

const path = (type, name) => `@grafana/schema/dist/esm/raw/composable/${type}/panelcfg/x/${name}PanelCfg_types.gen`;
const imports = Object.entries(panels).map(
  ([type, name]) => `import type * as ${name} from "${path(type, name)}";`,
);
// JSON has strings where TypeScript has enumerations of strings; a panel needs only the options that it sets.
const head = `import type { Dashboard } from "@grafana/schema";
${imports.join("\n")}
type Json<T> = T extends string ? \`\${T}\` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
`;

const folder = join(here, "generated");
rmSync(folder, { recursive: true, force: true });
mkdirSync(folder);
for (const name of ["fleet", "vm", "scanner"]) {
  const dashboard = JSON.parse(readFileSync(join(dashboards, `${name}.json`), "utf8"));
  const lines = [head, `export const dashboard: Json<Dashboard> = ${JSON.stringify(dashboard, null, 1)};`];
  for (const panel of dashboard.panels.filter((panel) => panel.type !== "row")) {
    const kind = panels[panel.type];
    if (!kind) throw new Error(`${name}.json: panels of type ${panel.type} are not checked`);
    lines.push(`// ${panel.title}`);
    lines.push(`export const options${panel.id}: Json<Partial<${kind}.Options>> = ${JSON.stringify(panel.options)};`);
    const custom = JSON.stringify(panel.fieldConfig.defaults.custom);
    if (custom !== "{}") {
      lines.push(`export const custom${panel.id}: Json<Partial<${kind}.FieldConfig>> = ${custom};`);
    }
  }
  writeFileSync(join(folder, `${name}.ts`), lines.join("\n"));
}
const tsc = join(here, "node_modules", "typescript", "bin", "tsc");
const files = ["fleet", "vm", "scanner"].map((name) => join(folder, `${name}.ts`));
const options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"];
try {
  execFileSync(process.execPath, [tsc, ...options, ...files], { stdio: "inherit" });
} catch {
  process.exit(1);
}
