//! The rules of rooms, and where a crate breaks them.

use crate::source::{Impl, Kind, Mention, Name, Place, Source};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Most lines of an `impl` block.
const MOST_IMPL_LINES: usize = 400;
/// Re-exports that are followed from a name to its definition.
const MOST_REEXPORTS: usize = 8;

/// What holds in a crate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules<'a> {
    /// The modules below the root, bottom first: each may name itself and those before it. The root may name all, and no
    /// room may name the root.
    pub(crate) rooms: &'a [&'a str],
    /// Most fields of a struct; `None`: any number.
    pub(crate) most_fields: Option<usize>,
    /// Whether the modules of one room may name each other in a circle. Rooms cannot, having an order.
    pub(crate) circles: bool,
}

/// A rule that is broken.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Breach {
    place: Place,
    what: String,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}: {}",
            self.place.file.display(),
            self.place.line,
            self.what
        )
    }
}

/// All breaches of a crate.
pub(crate) fn breaches(source: &Source, rules: &Rules<'_>) -> Vec<Breach> {
    let names = Names::of(source);
    let arrows = names.arrows(source);
    let mut all = unknown_rooms(source, rules);
    all.extend(upward(&arrows, rules));
    all.extend(scattered_types(source, &names));
    all.extend(long_impls(source));
    all.extend(wide_structs(source, rules));
    all.extend(hidden(source));
    if !rules.circles {
        let mut edges: Vec<Edge<'_>> = arrows.iter().filter_map(|arrow| names.followed(arrow)).collect();
        edges.extend(names.calls(source, &edges));
        all.extend(circles(&edges));
    }
    all.sort();
    all
}

/// A type: the module that defines it, and its name there.
type Type = (Name, String);

/// One module names another.
struct Arrow<'a> {
    at: &'a Place,
    to: Name,
    /// The path as it is written.
    path: &'a [String],
}

/// One module depends on another: it names what is defined there, or calls it.
struct Edge<'a> {
    at: &'a Place,
    to: Name,
}

/// What names stand for.
struct Names<'a> {
    source: &'a Source,
    /// What each module imports: a name and its path from the root; `*` for all names of a module.
    imports: BTreeMap<&'a [String], Vec<(&'a str, Name)>>,
}

impl<'a> Names<'a> {
    fn of(source: &'a Source) -> Self {
        let mut names = Self {
            source,
            imports: BTreeMap::new(),
        };
        for mention in &source.mentions {
            if let (Kind::Import(name), Some(path)) = (&mention.kind, names.absolute(mention)) {
                let module = mention.at.module.as_slice();
                names.imports.entry(module).or_default().push((name, path));
            }
        }
        names
    }

    /// A path from the crate's root; `None` if it leads out of the crate.
    fn absolute(&self, mention: &Mention) -> Option<Name> {
        let mut module = mention.at.module.clone();
        let mut path = mention.path.iter();
        let mut first = path.next()?;
        match first.as_str() {
            "crate" => module.clear(),
            "self" => {}
            "super" => {
                while first == "super" {
                    module.pop();
                    let Some(next) = path.next() else {
                        return Some(module);
                    };
                    first = next;
                }
                module.push(first.clone());
            }
            // A child, named without `self`, or something imported.
            name => {
                let imports = self.imports.get(module.as_slice());
                let import = imports.into_iter().flatten().find(|(known, _)| *known == name);
                module.push(name.to_owned());
                if !self.source.modules.contains(&module) {
                    module.clone_from(&import?.1);
                }
            }
        }
        module.extend(path.cloned());
        Some(module)
    }

    /// The module that a path leads to, or that has the item.
    fn module_of(&self, path: &[String]) -> Name {
        let is_module = |len: &usize| self.source.modules.contains(&path[..*len]);
        let len = (0..=path.len()).rev().find(is_module).unwrap_or(0);
        path[..len].to_vec()
    }

    fn arrows(&self, source: &'a Source) -> Vec<Arrow<'a>> {
        let arrow = |mention: &'a Mention| {
            let path = self.absolute(mention)?;
            let to = self.module_of(&path);
            // Exported macros are the root's, wherever they are written.
            let is_root_macro = mention.kind == Kind::Macro && path.len() == 1;
            let elsewhere = to != mention.at.module && !is_root_macro;
            elsewhere.then_some(Arrow {
                at: &mention.at,
                to,
                path: &mention.path,
            })
        };
        source.mentions.iter().filter_map(arrow).collect()
    }

    /// To where what is named is defined, through re-exports; `None` if that is the module itself.
    fn followed(&self, arrow: &Arrow<'a>) -> Option<Edge<'a>> {
        let mention = self.source.mentions.iter().find(|mention| {
            std::ptr::eq(&raw const mention.at, arrow.at) && mention.path.as_slice() == arrow.path
        })?;
        let mut path = self.absolute(mention)?;
        for _ in 0..MOST_REEXPORTS {
            let module = self.module_of(&path);
            let Some((name, rest)) = path[module.len()..].split_first() else {
                break;
            };
            let imports = self.imports.get(module.as_slice());
            let Some((_, import)) = imports.into_iter().flatten().find(|(known, _)| known == name) else {
                break;
            };
            path = [import, rest].concat();
        }
        let to = self.module_of(&path);
        (to != arrow.at.module).then_some(Edge { at: arrow.at, to })
    }

    /// From whoever calls a method to the module that has it, where a type has its methods in several modules: such calls
    /// name nothing. Calls on `self` are all found; on other values, those of methods whose names no other type has, by modules
    /// that name the type's.
    fn calls(&self, source: &'a Source, named: &[Edge<'_>]) -> Vec<Edge<'a>> {
        let named: BTreeSet<(&[String], &[String])> = named
            .iter()
            .map(|edge| (edge.at.module.as_slice(), edge.to.as_slice()))
            .collect();
        let mut modules: BTreeMap<Type, BTreeSet<&[String]>> = BTreeMap::new();
        let mut methods: BTreeMap<(&str, Type), BTreeSet<&[String]>> = BTreeMap::new();
        let mut types: BTreeMap<&str, BTreeSet<Type>> = BTreeMap::new();
        let inherent = || source.impls.iter().filter(|block| !block.of_trait);
        let of = |block: &Impl| self.definition(&block.at.module, &block.of);
        for block in inherent() {
            modules.entry(of(block)).or_default().insert(&block.at.module);
        }
        for block in &source.impls {
            for name in &block.functions {
                types.entry(name).or_default().insert(of(block));
                if !block.of_trait {
                    let there = methods.entry((name, of(block))).or_default();
                    there.insert(&block.at.module);
                }
            }
        }
        let is_scattered = |of: &Type| modules.get(of).is_some_and(|modules| modules.len() > 1);
        let edges = |name: &str, of: Type, at: &'a Place| {
            let there = methods.get(&(name, of)).into_iter().flatten();
            let elsewhere = there.filter(|module| **module != at.module.as_slice());
            elsewhere
                .map(|module| Edge {
                    at,
                    to: module.to_vec(),
                })
                .collect::<Vec<_>>()
        };
        let mut all = Vec::new();
        for block in inherent().filter(|block| is_scattered(&of(block))) {
            for (name, at) in &block.own_calls {
                all.extend(edges(name, of(block), at));
            }
        }
        for (name, at) in &source.calls {
            let only = types.get(name.as_str()).filter(|types| types.len() == 1);
            let Some(of) = only.and_then(|types| types.first()) else {
                continue;
            };
            if is_scattered(of) && (of.0 == at.module || named.contains(&(at.module.as_slice(), &of.0[..]))) {
                all.extend(edges(name, of.clone(), at));
            }
        }
        all
    }

    /// Where a type is defined that a module calls so.
    fn definition(&self, module: &[String], name: &[String]) -> (Name, String) {
        let as_written = (module.to_vec(), name.join("::"));
        self.find(module, name, MOST_REEXPORTS).unwrap_or(as_written)
    }

    fn find(&self, module: &[String], name: &[String], patience: usize) -> Option<(Name, String)> {
        let patience = patience.checked_sub(1)?;
        if let [name] = name {
            let here = (module.to_vec(), name.clone());
            if self.source.types.contains(&here) {
                return Some(here);
            }
            let imports = self.imports.get(module).map_or(&[][..], Vec::as_slice);
            return imports.iter().find_map(|(known, path)| match *known {
                "*" => (path != module)
                    .then(|| self.find(path, std::slice::from_ref(name), patience))
                    .flatten(),
                known if known == name => {
                    let (last, module) = path.split_last()?;
                    self.find(module, std::slice::from_ref(last), patience)
                }
                _ => None,
            });
        }
        let written = Mention {
            at: Place {
                module: module.to_vec(),
                file: Default::default(),
                line: 0,
            },
            path: name.to_vec(),
            kind: Kind::Code,
        };
        let path = self.absolute(&written)?;
        let (last, module) = path.split_last()?;
        self.find(module, std::slice::from_ref(last), patience)
    }
}

/// The room of a module; `None` for the root.
fn room(module: &[String]) -> Option<&str> {
    module.first().map(String::as_str)
}

fn unknown_rooms(source: &Source, rules: &Rules<'_>) -> Vec<Breach> {
    let root = Place {
        module: Name::new(),
        file: "the list of rooms".into(),
        line: 0,
    };
    let breach = |what: String| Breach {
        place: root.clone(),
        what,
    };
    let rooms: BTreeSet<&str> = source.modules.iter().filter_map(|module| room(module)).collect();
    let unlisted = rooms.iter().filter(|room| !rules.rooms.contains(room));
    let missing = rules.rooms.iter().filter(|room| !rooms.contains(*room));
    unlisted
        .map(|room| breach(format!("the module {room} is in no list: say where it stands")))
        .chain(missing.map(|room| breach(format!("there is no module {room}"))))
        .collect()
}

fn upward(arrows: &[Arrow<'_>], rules: &Rules<'_>) -> Vec<Breach> {
    let height = |room: &str| rules.rooms.iter().position(|known| *known == room);
    let breach = |arrow: &Arrow<'_>| {
        let from = room(&arrow.at.module)?;
        let path = arrow.path.join("::");
        let what = match room(&arrow.to) {
            None => format!("{from} names the root by {path}: name the module that has it"),
            Some(to) if height(to) > height(from) => {
                format!("{from} names {to}, which stands above it, by {path}")
            }
            Some(_) => return None,
        };
        Some(Breach {
            place: arrow.at.clone(),
            what,
        })
    };
    arrows.iter().filter_map(breach).collect()
}

/// Types with inherent `impl` blocks in two rooms.
fn scattered_types(source: &Source, names: &Names<'_>) -> Vec<Breach> {
    let mut first: BTreeMap<(Name, String), &Impl> = BTreeMap::new();
    let mut all = Vec::new();
    for block in source.impls.iter().filter(|block| !block.of_trait) {
        let definition = names.definition(&block.at.module, &block.of);
        let other = *first.entry(definition.clone()).or_insert(block);
        let (here, there) = (room(&block.at.module), room(&other.at.module));
        if here != there {
            let name = |room: Option<&str>| room.unwrap_or("the root").to_owned();
            all.push(Breach {
                place: block.at.clone(),
                what: format!(
                    "{} has methods in two rooms, {} and {}",
                    definition.1,
                    name(there),
                    name(here)
                ),
            });
        }
    }
    all
}

fn long_impls(source: &Source) -> Vec<Breach> {
    let long = source.impls.iter().filter(|block| block.lines > MOST_IMPL_LINES);
    long.map(|block| Breach {
        place: block.at.clone(),
        what: format!(
            "an impl of {} has {} lines, {MOST_IMPL_LINES} are allowed",
            block.of.join("::"),
            block.lines
        ),
    })
    .collect()
}

fn wide_structs(source: &Source, rules: &Rules<'_>) -> Vec<Breach> {
    let most = rules.most_fields.unwrap_or(usize::MAX);
    let wide = source.structs.iter().filter(|wide| wide.fields > most);
    wide.map(|wide| Breach {
        place: wide.at.clone(),
        what: format!("{} has {} fields, {most} are allowed", wide.name, wide.fields),
    })
    .collect()
}

/// What the reader cannot follow.
fn hidden(source: &Source) -> Vec<Breach> {
    let breach = |(what, place): &(&str, Place)| Breach {
        place: place.clone(),
        what: format!("{what} hides what it names: write it out"),
    };
    source.hidden.iter().map(breach).collect()
}

/// Circles of modules that name or call each other; of each, what closes it.
fn circles(edges: &[Edge<'_>]) -> Vec<Breach> {
    let mut graph: BTreeMap<&[String], BTreeMap<&[String], &Place>> = BTreeMap::new();
    for edge in edges {
        let from = graph.entry(&edge.at.module).or_default();
        from.entry(&edge.to).or_insert(edge.at);
    }
    let mut search = Search {
        graph: &graph,
        done: BTreeSet::new(),
        way: Vec::new(),
        found: Vec::new(),
    };
    for module in graph.keys() {
        search.visit(module);
    }
    search.found
}

/// A search in depth.
struct Search<'a> {
    graph: &'a BTreeMap<&'a [String], BTreeMap<&'a [String], &'a Place>>,
    done: BTreeSet<&'a [String]>,
    way: Vec<&'a [String]>,
    found: Vec<Breach>,
}

impl<'a> Search<'a> {
    fn visit(&mut self, module: &'a [String]) {
        if !self.done.insert(module) {
            return;
        }
        self.way.push(module);
        for (to, place) in self.graph.get(module).into_iter().flatten() {
            if let Some(start) = self.way.iter().position(|other| other == to) {
                let circle = self.way[start..].iter().chain([to]);
                let names: Vec<String> = circle.map(|module| full_name(module)).collect();
                self.found.push(Breach {
                    place: (*place).clone(),
                    what: format!(
                        "modules name or call each other in a circle: {}",
                        names.join(" > ")
                    ),
                });
            } else {
                self.visit(to);
            }
        }
        self.way.pop();
    }
}

fn full_name(module: &[String]) -> String {
    let names = ["crate"].into_iter().chain(module.iter().map(String::as_str));
    names.collect::<Vec<_>>().join("::")
}
