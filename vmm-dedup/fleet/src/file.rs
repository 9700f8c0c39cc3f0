//! The fleet file: what the TOML may say, before anything is made of it.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use vmm_dedup::Setup;
use vmm_dedup_host::Failure;
use vmm_dedup_host::store::parse_metrics;
use vmm_dedup_protocol::name::{FILE_NAME_RULE, is_file_name};

/// The trust domain of `[store]`.
pub(crate) const DEFAULT_DOMAIN: &str = "default";

/// Most bytes of a file: 4,096 VMs with all of their keys have fewer.
const MOST_BYTES: u64 = 16 << 20;

/// A whole file.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FleetFile {
    /// Default: the file's name without its extension.
    pub(crate) name: Option<String>,
    /// The preload library.
    pub(crate) preload: Option<PathBuf>,
    /// VMs that are started at a time.
    pub(crate) parallel: Option<u16>,
    /// How long one VM may take to start, seconds.
    pub(crate) start_timeout_s: Option<u64>,
    /// Who VMMs run as that have no `user` of their own.
    pub(crate) user: Option<String>,
    /// More groups of theirs, where they have no `groups` of their own.
    pub(crate) groups: Option<Vec<String>>,
    /// The store of the trust domain `default`.
    #[serde(default)]
    pub(crate) store: StoreSettings,
    /// More trust domains, each with a store of its own.
    #[serde(default)]
    pub(crate) domain: BTreeMap<String, StoreSettings>,
    /// What VMs have in common.
    #[serde(default)]
    pub(crate) template: BTreeMap<String, VmSettings>,
    /// The VMs.
    #[serde(default)]
    pub(crate) vm: Vec<VmSettings>,
}

/// `[store]` or `[domain.NAME]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, expecting = "a table of a store's settings")]
pub(crate) struct StoreSettings {
    pub(crate) socket: Option<PathBuf>,
    /// ADDRESS:PORT, or "none".
    pub(crate) metrics: Option<Metrics>,
    pub(crate) max_mib: Option<u64>,
    pub(crate) ordered: Option<bool>,
    pub(crate) secure: Option<bool>,
}

/// Where a store serves its metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Metrics(pub(crate) Option<SocketAddr>);

impl TryFrom<String> for Metrics {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        parse_metrics(&text).map(Self)
    }
}

impl From<Metrics> for String {
    fn from(metrics: Metrics) -> Self {
        metrics.0.map_or("none".to_owned(), |address| address.to_string())
    }
}

/// Which VMM runs a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Vmm {
    /// Cloud Hypervisor, with the preload library.
    CloudHypervisor,
    /// The reference VMM: `vmm-dedup run`.
    Reference,
    /// QEMU, with the preload library.
    Qemu,
}

impl std::fmt::Display for Vmm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::Reference => "reference",
            Self::Qemu => "qemu",
        })
    }
}

/// An entry of `[[vm]]`, or a template, which has neither `name`, `count` nor `template`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, expecting = "a table of a VM's settings")]
pub(crate) struct VmSettings {
    pub(crate) name: Option<String>,
    pub(crate) count: Option<u32>,
    pub(crate) template: Option<String>,
    pub(crate) vmm: Option<Vmm>,
    pub(crate) cpus: Option<u8>,
    pub(crate) memory_mib: Option<u64>,
    pub(crate) kernel: Option<String>,
    pub(crate) initramfs: Option<String>,
    pub(crate) cmdline: Option<String>,
    pub(crate) disks: Option<Vec<toml::Table>>,
    pub(crate) net: Option<Vec<toml::Table>>,
    pub(crate) vsock: Option<toml::Table>,
    /// Whether the guest's agent is heard.
    pub(crate) agent: Option<bool>,
    /// More of Cloud Hypervisor's `vm.create`.
    pub(crate) api: Option<toml::Table>,
    pub(crate) extra_args: Option<Vec<String>>,
    /// Who its VMM runs as: a name or a number.
    pub(crate) user: Option<String>,
    /// More groups of that user, names or numbers.
    pub(crate) groups: Option<Vec<String>>,
    pub(crate) domain: Option<String>,
    /// `mode`, and the engine's settings, as a table or as a line.
    #[serde(default, deserialize_with = "table_or_line")]
    pub(crate) dedup: Option<toml::Table>,
}

impl VmSettings {
    /// These settings, completed by a template's. The tables `dedup` and `api` are completed key by key.
    pub(crate) fn over(self, template: &Self) -> Self {
        let t = template.clone();
        let merged = |mine: Option<toml::Table>, theirs: Option<toml::Table>| match (mine, theirs) {
            (Some(mine), Some(mut both)) => {
                both.extend(mine);
                Some(both)
            }
            (mine, theirs) => mine.or(theirs),
        };
        Self {
            name: self.name,
            count: self.count,
            template: self.template,
            vmm: self.vmm.or(t.vmm),
            cpus: self.cpus.or(t.cpus),
            memory_mib: self.memory_mib.or(t.memory_mib),
            kernel: self.kernel.or(t.kernel),
            initramfs: self.initramfs.or(t.initramfs),
            cmdline: self.cmdline.or(t.cmdline),
            disks: self.disks.or(t.disks),
            net: self.net.or(t.net),
            vsock: self.vsock.or(t.vsock),
            agent: self.agent.or(t.agent),
            api: merged(self.api, t.api),
            extra_args: self.extra_args.or(t.extra_args),
            user: self.user.or(t.user),
            groups: self.groups.or(t.groups),
            domain: self.domain.or(t.domain),
            dedup: merged(self.dedup, t.dedup),
        }
    }
}

/// Settings of dedup as a table, or as the line that embedders and the preload library take; written out, so that those of a VM are laid
/// over its template's key by key.
fn table_or_line<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<toml::Table>, D::Error> {
    let said = |error: String| serde::de::Error::custom(format!("dedup: {error}"));
    match toml::Value::deserialize(deserializer)? {
        toml::Value::Table(table) => Ok(Some(written_out(&table).unwrap_or(table))),
        toml::Value::String(line) => {
            let table = Setup::table(&line).map_err(|error| said(vmm_dedup_engines::mistake(error)))?;
            let table = toml::Table::try_from(table).map_err(|error| said(error.to_string()))?;
            Ok(Some(table))
        }
        other => Err(said(format!(
            "{other} is neither a table nor a line of settings, e.g. \"cpu_percent=10\""
        ))),
    }
}

/// A table without short forms. (Mistakes in it are told of where a VM has it.)
fn written_out(table: &toml::Table) -> Option<toml::Table> {
    let fields = table.clone().try_into().ok()?;
    toml::Table::try_from(Setup::written_out(fields).ok()?).ok()
}

/// Reads a file's text. What never ends, as a device, is no fleet file.
pub(crate) fn read(path: &Path) -> Result<String, Failure> {
    let fail = |why: String| Failure::new(format!("cannot read the fleet file {}: {why}", path.display()));
    let file = fs::File::open(path).map_err(|e| fail(e.to_string()))?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| fail(e.to_string()))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(fail(format!("it has more than {} MiB", MOST_BYTES >> 20)));
    }
    String::from_utf8(bytes).map_err(|e| {
        let valid = String::from_utf8_lossy(&e.as_bytes()[..e.utf8_error().valid_up_to()]).into_owned();
        let (line, column) = position(&valid, valid.len());
        Failure::new(format!(
            "{}:{line}:{column}: what is here is not UTF-8",
            path.display()
        ))
    })
}

/// Parses TOML; an error is one line that begins with `FILE:LINE:COLUMN`.
fn parse<T: serde::de::DeserializeOwned>(path: &Path, text: &str) -> Result<T, Failure> {
    toml::from_str(text).map_err(|e| {
        let (line, column) = position(text, e.span().map_or(0, |span| span.start));
        let message = in_words(&e.message().split_whitespace().collect::<Vec<_>>().join(" "));
        Failure::new(format!("{}:{line}:{column}: {message}", path.display()))
    })
}

/// What serde and toml call types that are not ours, and what TOML or a person calls them.
const WORDS: [(&str, &str); 15] = [
    ("expected u8", "expected a whole number, 0 to 255"),
    ("expected u16", "expected a whole number, 0 to 65535"),
    ("expected u32", "expected a whole number, 0 to 4294967295"),
    ("expected u64", "expected a whole number"),
    ("expected a sequence", "expected a list"),
    ("expected a map", "expected a table"),
    ("invalid type: map", "invalid type: table"),
    ("invalid type: sequence", "invalid type: list"),
    ("expected path string", "expected text"),
    ("expected a string", "expected text"),
    ("wanted string or table", "expected text"),
    ("wanted exactly 1 element, found 0 elements", "expected text"),
    (" as i128", ""),
    (
        "expected any valid TOML value",
        "expected 9223372036854775807 at most",
    ),
    ("unknown field `$__toml_private_datetime`", "invalid type: date"),
];

/// A parser's message without the names of the program's types.
pub(crate) fn in_words(message: &str) -> String {
    WORDS
        .iter()
        .fold(message.to_owned(), |message, (of_program, word)| {
            match message.strip_suffix(of_program) {
                Some(before) => format!("{before}{word}"),
                None => message.replace(&format!("{of_program},"), &format!("{word},")),
            }
        })
}

/// Line and column of a byte, from 1; columns are letters, as editors count them.
fn position(text: &str, at: usize) -> (usize, usize) {
    let before = &text[..at.min(text.len())];
    let line = before.matches('\n').count() + 1;
    let begin = before.rfind('\n').map_or(0, |at| at + 1);
    (line, before[begin..].chars().count() + 1)
}

/// The spans of what a table's keys have.
type Spans = BTreeMap<String, Spanned<toml::Value>>;

/// What a key of these tables has, one in the other; of the first that is missing, what has the one before.
pub(crate) fn place_of_key(text: &str, keys: &[&str]) -> Option<(usize, usize)> {
    let whole = DeTable::parse(text).ok()?;
    let (mut table, mut at) = (Some(whole.get_ref()), None);
    for key in keys {
        let Some((_, value)) = table.and_then(|table| table.iter().find(|(name, _)| name.get_ref() == key))
        else {
            break;
        };
        at = Some(value.span().start);
        table = match value.get_ref() {
            DeValue::Table(table) => Some(table),
            _ => None,
        };
    }
    Some(position(text, at?))
}

/// Where a mistake is that is in a `[[vm]]`: at this key, or else the first of its keys, or of its template's, that the mistake's
/// text names; else where the entry begins.
pub(crate) fn place(text: &str, entry: usize, key: Option<&str>, mistake: &str) -> Option<(usize, usize)> {
    #[derive(Deserialize)]
    struct Whole {
        #[serde(default)]
        vm: Vec<Spanned<Spans>>,
        #[serde(default)]
        template: BTreeMap<String, Spans>,
    }
    let whole: Whole = toml::from_str(text).ok()?;
    let entry = whole.vm.get(entry)?;
    let keys = entry.get_ref();
    let template = keys.get("template").and_then(|name| name.get_ref().as_str());
    let inherited = template.and_then(|name| whole.template.get(name));
    // After the VM's name, which may be the same as that of a key.
    let said = mistake.split_once("\": ").map_or(mistake, |(_, said)| said);
    let named = |keys: &Spans| {
        let words = said.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let mut words = key.into_iter().chain(words.filter(|_| key.is_none()));
        words
            .find_map(|word| keys.get(word))
            .map(|value| value.span().start)
    };
    let at = named(keys).or_else(|| inherited.and_then(named));
    Some(position(text, at.unwrap_or(entry.span().start)))
}

impl FleetFile {
    /// Parses a file's text; `path` is for messages.
    ///
    /// # Errors
    /// A [`Failure`] of one line that begins with `PATH:LINE:COLUMN`.
    pub fn parse(path: &Path, text: &str) -> Result<Self, Failure> {
        parse(path, text)
    }

    /// The file as TOML, without comments: parsed, it is the same again.
    ///
    /// # Errors
    /// A [`Failure`] if TOML cannot say it.
    pub fn print(&self) -> Result<String, Failure> {
        toml::to_string(self).map_err(Failure::from_error)
    }
}

/// The name of the fleet in a file that need not be right otherwise, so that `down` and `status` work although
/// somebody is editing it.
pub(crate) fn name_in(path: &Path) -> Result<String, Failure> {
    #[derive(Deserialize)]
    struct Named {
        name: Option<String>,
    }
    let text = read(path)?;
    let named: Named = parse(path, &text)?;
    let name = fleet_name(path, named.name);
    check_fleet_name(&name).map_err(|mistake| {
        let place = place_of_key(&text, &["name"]).map(|(line, column)| format!(":{line}:{column}"));
        Failure::new(format!(
            "{}{}: {mistake}",
            path.display(),
            place.unwrap_or_default()
        ))
    })?;
    Ok(name)
}

/// The fleet's name: as given, else the file's.
pub(crate) fn fleet_name(path: &Path, given: Option<String>) -> String {
    let stem = || path.file_stem().map(|s| s.to_string_lossy().into_owned());
    given.or_else(stem).unwrap_or_default()
}

pub(crate) fn check_fleet_name(name: &str) -> Result<(), String> {
    check_name("the fleet's name", name).map_err(|mistake| format!("{mistake} (the key `name` sets it)"))
}

/// Names become file names and labels.
pub(crate) fn check_name(what: &str, name: &str) -> Result<(), String> {
    match is_file_name(name) {
        true => Ok(()),
        false => Err(format!("{what} is {name:?}: {FILE_NAME_RULE}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        FleetFile::parse(Path::new("fleet.toml"), text)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn errors_are_one_line_with_file_line_and_column() {
        for (text, expected) in [
            ("name = \"a\"\n[store\n", "fleet.toml:2:7: "),
            (
                "[[vm]]\nname = \"a\"\nkernle = \"k\"\n",
                "fleet.toml:3:1: unknown field `kernle`, expected one of `name`",
            ),
            ("fleet = 3", "fleet.toml:1:1: unknown field `fleet`"),
            (
                "[store]\nsocket = 3\n",
                "fleet.toml:2:10: invalid type: integer `3`",
            ),
            (
                "[store]\nmetrics = \"9753\"\n",
                "fleet.toml:2:11: expected ADDRESS:PORT",
            ),
            (
                "[[vm]]\nvmm = \"xen\"\n",
                "fleet.toml:2:7: unknown variant `xen`, expected one of `cloud-hypervisor`",
            ),
            (
                "[[vm]]\ncpus = 300\n",
                "fleet.toml:2:8: invalid value: integer `300`",
            ),
            (
                "[[vm]]\ncpus = \"x\"\n",
                "fleet.toml:2:8: invalid type: string \"x\", expected a whole number, 0 to 255",
            ),
            (
                "[domain]\nx = 0\n",
                "fleet.toml:2:5: invalid type: integer `0`, expected a table of a store's settings",
            ),
            (
                "[template]\nx = 0\n",
                "fleet.toml:2:5: invalid type: integer `0`, expected a table of a VM's settings",
            ),
            (
                "[vm]\nname = \"a\"\n",
                "fleet.toml:1:1: invalid type: table, expected a list",
            ),
            ("[[vm]]\nvmm = 7\n", "fleet.toml:2:7: expected text"),
            (
                "vm = [{ name = \"\u{e4}\u{e4}\", cpus = 300 }]\n",
                "fleet.toml:1:29: invalid value: integer `300`",
            ),
            ("name = \"a\"\nname = \"b\"\n", "fleet.toml:2:1: duplicate key"),
        ] {
            let error = error(text);
            assert!(error.starts_with(expected), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    #[test]
    fn no_type_of_the_program_is_named_and_its_libraries_say_what_is_replaced() {
        let cases = [
            (
                "[[vm]]\ncpus = \"x\"",
                "string \"x\", expected a whole number, 0 to 255",
            ),
            (
                "parallel = 65536",
                "integer `65536`, expected a whole number, 0 to 65535",
            ),
            (
                "[[vm]]\ncount = -1",
                "integer `-1`, expected a whole number, 0 to 4294967295",
            ),
            (
                "start_timeout_s = 0.5",
                "floating point `0.5`, expected a whole number",
            ),
            ("vm = 1", "integer `1`, expected a list"),
            ("domain = 1", "integer `1`, expected a table"),
            ("vm = {}", "invalid type: table, expected a list"),
            ("name = []", "invalid type: list, expected text"),
            ("preload = 1", "integer `1`, expected text"),
            ("[[vm]]\nvmm = 1", "expected text"),
            ("store = 1", "integer `1`, expected a table of a store's settings"),
            (
                "template.t = 1",
                "integer `1`, expected a table of a VM's settings",
            ),
            ("[[vm]]\nvmm = {}", "expected text"),
            (
                "parallel = 99999999999999999999",
                "integer `99999999999999999999`, expected a whole number, 0 to 65535",
            ),
            (
                "[[vm]]\ndedup = 99999999999999999999",
                "expected 9223372036854775807 at most",
            ),
            (
                "store = 1979-05-27",
                "invalid type: date, expected one of `socket`, `metrics`, `max_mib`, `ordered`, `secure`",
            ),
        ];
        for (text, expected) in cases {
            let error = error(text);
            assert!(error.ends_with(expected), "{text}: {error}");
        }
        let said = cases.map(|(text, _)| {
            toml::from_str::<FleetFile>(text)
                .unwrap_err()
                .message()
                .to_owned()
        });
        for (of_program, _) in WORDS {
            assert!(
                said.iter().any(|said| said.contains(of_program)),
                "no library says {of_program:?} any more"
            );
        }
    }

    #[test]
    fn what_is_no_text_or_never_ends_is_told_without_being_read_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let odd = folder.path().join("odd.toml");
        fs::write(&odd, b"name = \"a\"\n# \xff\n").unwrap();
        let error = |path: &Path| read(path).unwrap_err().to_string();
        assert!(
            error(&odd).ends_with("odd.toml:2:3: what is here is not UTF-8"),
            "{}",
            error(&odd)
        );
        assert_eq!(
            error(Path::new("/dev/zero")),
            "cannot read the fleet file /dev/zero: it has more than 16 MiB"
        );
    }

    #[test]
    fn a_mistake_is_where_its_key_is() {
        let text = "[template.t]\nkernel = \"k\"\ncpus = 0\n\n[[vm]]\nname = \"a\"\ntemplate = \"t\"\n\n[[vm]]\nname = \"b\"\n\
                    dedup = { breaks = 3 }\n";
        assert_eq!(place(text, 0, None, "VM \"a\": cpus is 0"), Some((3, 8)));
        assert_eq!(
            place(text, 1, None, "VM \"b\": dedup: breaks must be"),
            Some((11, 9))
        );
        assert_eq!(place(text, 1, Some("dedup"), "its name"), Some((11, 9)));
        assert_eq!(
            place(text, 1, None, "VM \"name\": it has no kernel"),
            Some((9, 1))
        );
        assert_eq!(place(text, 2, None, "x"), None);
        assert_eq!(place_of_key(text, &["template", "t", "cpus"]), Some((3, 8)));
        assert_eq!(place_of_key(text, &["template", "t", "disks"]), Some((1, 1)));
        assert_eq!(place_of_key(text, &["store", "max_mib"]), None);
    }

    #[test]
    fn an_entry_goes_over_its_template_and_tables_are_completed() {
        let file = FleetFile::parse(
            Path::new("fleet.toml"),
            r#"
            [template.small]
            cpus = 2
            memory_mib = 64
            dedup = { cpu_percent = 5, pass_period_ms = 500 }
            [[vm]]
            name = "a"
            cpus = 1
            dedup = { cpu_percent = 7 }
            "#,
        )
        .unwrap();
        let vm = file.vm[0].clone().over(&file.template["small"]);
        assert_eq!((vm.cpus, vm.memory_mib), (Some(1), Some(64)));
        let dedup = vm.dedup.unwrap();
        assert_eq!(dedup["cpu_percent"].as_integer(), Some(7));
        assert_eq!(dedup["pass_period_ms"].as_integer(), Some(500));
    }

    #[test]
    fn a_short_form_goes_over_what_it_is_short_for() {
        for (template, entry) in [
            ("{ cpu_percent = 7 }", "{ budget = 5 }"),
            ("{ budget = 7 }", "{ cpu_percent = 5 }"),
            ("\"budget=7\"", "{ cpu_percent = 5 }"),
            ("{ cpu_percent = 7 }", "\"budget=5\""),
        ] {
            let text = format!(
                "[template.t]\ndedup = {template}\n[[vm]]\nname = \"a\"\ntemplate = \"t\"\ndedup = {entry}\n"
            );
            let file = FleetFile::parse(Path::new("fleet.toml"), &text).unwrap();
            let dedup = file.vm[0].clone().over(&file.template["t"]).dedup.unwrap();
            let expected = "cpu_percent = 5".parse::<toml::Table>().unwrap();
            assert_eq!(dedup, expected, "{template} {entry}");
        }
    }
}
