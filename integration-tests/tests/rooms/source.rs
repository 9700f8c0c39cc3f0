//! A crate's modules, as far as rooms need them: who names whom, where types are, and how long things are.
//!
//! What is compiled for tests only is left out, and so are `tests` modules in files of their own. Macros are not expanded.

use crate::reader;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Names from the crate's root to a module, or to an item in it.
pub(crate) type Name = Vec<String>;

/// A place in a source file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) module: Name,
    pub(crate) file: PathBuf,
    pub(crate) line: usize,
}

/// A path that a module names, as it is written.
#[derive(Clone, Debug)]
pub(crate) struct Mention {
    pub(crate) at: Place,
    pub(crate) path: Name,
    pub(crate) kind: Kind,
}

/// How a path is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// By `use`, under this name; `*` for all names.
    Import(String),
    /// In code.
    Code,
    /// In code, as a macro.
    Macro,
}

/// An `impl` block.
#[derive(Clone, Debug)]
pub(crate) struct Impl {
    pub(crate) at: Place,
    /// The type as it is written, without generics.
    pub(crate) of: Name,
    /// Of a trait, not inherent.
    pub(crate) of_trait: bool,
    pub(crate) lines: usize,
    /// The functions in it.
    pub(crate) functions: Vec<String>,
    /// Its own type's functions that it calls: `self.name()` and `Self::name()`.
    pub(crate) own_calls: Vec<(String, Place)>,
}

/// A struct.
#[derive(Clone, Debug)]
pub(crate) struct Struct {
    pub(crate) at: Place,
    pub(crate) name: String,
    pub(crate) fields: usize,
}

/// All of a crate.
#[derive(Debug, Default)]
pub(crate) struct Source {
    pub(crate) modules: BTreeSet<Name>,
    pub(crate) mentions: Vec<Mention>,
    pub(crate) impls: Vec<Impl>,
    pub(crate) structs: Vec<Struct>,
    /// Methods that are called on any value.
    pub(crate) calls: Vec<(String, Place)>,
    /// What brings in code that is not read, or under another name.
    pub(crate) hidden: Vec<(&'static str, Place)>,
    /// Structs, enums and unions, by module.
    pub(crate) types: BTreeSet<(Name, String)>,
}

/// A module with a file of its own.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) module: Name,
    pub(crate) file: PathBuf,
    /// Where the files of its own children are.
    pub(crate) folder: PathBuf,
}

/// Reads files; `None` for those that do not exist.
pub(crate) type Files<'a> = &'a dyn Fn(&Path) -> Option<String>;

impl Source {
    /// Reads a crate from the file of its root.
    ///
    /// # Panics
    /// If a file of a module is missing.
    pub(crate) fn read(root: &Path, files: Files<'_>) -> Self {
        let mut source = Self::default();
        let folder = root.parent().unwrap_or(Path::new("")).to_owned();
        source.read_file(&[], root, &folder, files);
        source
    }

    /// `folder`: where the files of the module's children are.
    fn read_file(&mut self, module: &[String], file: &Path, folder: &Path, files: Files<'_>) {
        let text = files(file).unwrap_or_else(|| panic!("{} does not exist", file.display()));
        let children = reader::read(self, &text, file, module, folder, files);
        for child in children {
            self.read_file(&child.module, &child.file, &child.folder, files);
        }
    }
}
