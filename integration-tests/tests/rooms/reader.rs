//! Reads one source file: modules, paths, types and their methods.

use crate::source::{Child, Files, Impl, Kind, Mention, Name, Place, Source, Struct};
use crate::stream::{Attributes, Stream};
use crate::tokens::{Token, tokens};
use std::ops::Range;
use std::path::Path;

/// Reads the tokens of one file.
struct Reader<'a> {
    source: &'a mut Source,
    tokens: Stream<'a>,
    file: &'a Path,
    files: Files<'a>,
    children: Vec<Child>,
}

/// Enters what a module's file holds into `source`; returns the children that have files of their own. `folder`: where those
/// are.
pub(crate) fn read(
    source: &mut Source,
    text: &str,
    file: &Path,
    module: &[String],
    folder: &Path,
    files: Files<'_>,
) -> Vec<Child> {
    let tokens = tokens(text);
    let mut reader = Reader {
        source,
        tokens: Stream(&tokens),
        file,
        files,
        children: Vec::new(),
    };
    reader.read(0..tokens.len(), module, folder);
    reader.children
}

impl Reader<'_> {
    fn place(&self, module: &[String], at: usize) -> Place {
        Place {
            module: module.to_vec(),
            file: self.file.to_owned(),
            line: self.tokens.line(at),
        }
    }

    /// The tokens of a module, or of a part of it.
    fn read(&mut self, range: Range<usize>, module: &[String], folder: &Path) {
        self.source.modules.insert(module.to_vec());
        let mut at = range.start;
        let mut attributes = Attributes::default();
        while at < range.end {
            if self.tokens.is_sign(at, '#')
                && (self.tokens.is_sign(at + 1, '[') || self.tokens.is_sign(at + 2, '['))
            {
                let inner = self.tokens.is_sign(at + 1, '!');
                let open = at + 1 + usize::from(inner);
                let close = self.tokens.closing(open);
                let attribute = self.tokens.attribute(open + 1..close);
                if inner && attribute.test {
                    return;
                }
                attributes.add(attribute);
                at = close + 1;
                continue;
            }
            // Attributes belong to what comes behind `pub`.
            if self.tokens.is_word(at, "pub") && !attributes.test {
                at += 1;
                if self.tokens.is_sign(at, '(') {
                    at = self.tokens.closing(at) + 1;
                }
                continue;
            }
            let taken = std::mem::take(&mut attributes);
            at = if taken.test {
                self.tokens.end_of_item(at, range.end)
            } else {
                self.item(at, &taken, module, folder)
            };
        }
    }

    /// What begins at a token; returns where to go on.
    fn item(&mut self, at: usize, attributes: &Attributes, module: &[String], folder: &Path) -> usize {
        let Some(word) = self.tokens.token(at).and_then(Token::word).map(str::to_owned) else {
            return at + 1;
        };
        let place = self.place(module, at);
        if at > 0
            && self.tokens.is_sign(at - 1, '.')
            && (self.tokens.is_sign(at + 1, '(') || self.tokens.is_turbofish(at + 1))
        {
            self.source.calls.push((word, place));
            return at + 1;
        }
        match word.as_str() {
            "include" if self.tokens.is_sign(at + 1, '!') => self.source.hidden.push(("include!", place)),
            "extern" if self.tokens.is_word(at + 1, "crate") && self.tokens.is_word(at + 2, "self") => {
                self.source.hidden.push(("extern crate self", place));
            }
            "mod" => return self.module(at, attributes, module, folder),
            "use" => return self.import(at, module),
            "impl" if self.tokens.begins_item(at) => self.implementation(at, module),
            "struct" | "enum" | "union" => self.definition(at, module),
            _ => {}
        }
        self.path(at, module)
    }

    fn module(&mut self, at: usize, attributes: &Attributes, module: &[String], folder: &Path) -> usize {
        let Some(name) = self.tokens.token(at + 1).and_then(Token::word).map(str::to_owned) else {
            return at + 1;
        };
        let child: Name = module.iter().cloned().chain([name.clone()]).collect();
        let own_folder = folder.join(&name);
        if self.tokens.is_sign(at + 2, '{') {
            let end = self.tokens.closing(at + 2);
            self.read(at + 3..end, &child, &own_folder);
            return end + 1;
        }
        if self.tokens.is_sign(at + 2, ';') {
            let beside = folder.join(format!("{name}.rs"));
            let (file, folder) = match &attributes.path {
                Some(path) => {
                    let file = self.file.parent().unwrap_or(Path::new("")).join(path);
                    let folder = file.parent().unwrap_or(Path::new("")).to_owned();
                    (file, folder)
                }
                None if (self.files)(&beside).is_some() => (beside, own_folder),
                None => (own_folder.join("mod.rs"), own_folder),
            };
            self.children.push(Child {
                module: child,
                file,
                folder,
            });
        }
        at + 3
    }

    fn import(&mut self, at: usize, module: &[String]) -> usize {
        let mut end = at;
        while end < self.tokens.len() && !self.tokens.is_sign(end, ';') {
            end += 1;
        }
        let mut leaves = Vec::new();
        self.tree(at + 1, end, &mut Vec::new(), &mut leaves);
        for (path, name) in leaves {
            self.source.mentions.push(Mention {
                at: self.place(module, at),
                path,
                kind: Kind::Import(name),
            });
        }
        end + 1
    }

    /// One tree of `use`, behind a prefix; returns where it ends.
    fn tree(&self, mut at: usize, end: usize, prefix: &mut Name, leaves: &mut Vec<(Name, String)>) -> usize {
        let depth = prefix.len();
        while at < end {
            match self.tokens.token(at) {
                Some(Token::Word(word)) if word == "as" => {
                    let name = self.tokens.token(at + 1).and_then(Token::word).unwrap_or("_");
                    leaves.push((prefix.clone(), name.to_owned()));
                    prefix.truncate(depth);
                    return at + 2;
                }
                Some(Token::Word(word)) => prefix.push(word.clone()),
                Some(Token::PathSeparator) => {}
                Some(Token::Sign('*')) => {
                    leaves.push((prefix.clone(), "*".to_owned()));
                    prefix.truncate(depth);
                    return at + 1;
                }
                Some(Token::Sign('{')) => {
                    at += 1;
                    while at < end && !self.tokens.is_sign(at, '}') {
                        at = self.tree(at, end, prefix, leaves);
                        at += usize::from(self.tokens.is_sign(at, ','));
                    }
                    prefix.truncate(depth);
                    return at + 1;
                }
                _ => break,
            }
            at += 1;
        }
        // `a::{self}` is `a`.
        if prefix.len() > 1 && prefix.last().is_some_and(|word| word == "self") {
            prefix.pop();
        }
        if let Some(name) = prefix.last().cloned() {
            leaves.push((prefix.clone(), name));
        }
        prefix.truncate(depth);
        // At least one token further, so that broken source comes to an end.
        at.max(if self.tokens.is_sign(at, ',') || self.tokens.is_sign(at, '}') {
            at
        } else {
            at + 1
        })
    }

    /// A path of two names or more.
    fn path(&mut self, at: usize, module: &[String]) -> usize {
        let mut path = Name::new();
        let mut end = at;
        while let Some(word) = self.tokens.token(end).and_then(Token::word) {
            path.push(word.to_owned());
            if self.tokens.token(end + 1) != Some(&Token::PathSeparator) {
                break;
            }
            end += 2;
        }
        // Behind `::` it would be the rest of another path: those are read as a whole, but for `Type::<T>::f` and the like.
        let is_rest = at > 0 && self.tokens.token(at - 1) == Some(&Token::PathSeparator);
        let next = self
            .tokens
            .token(end)
            .and_then(Token::word)
            .map_or(end, |_| end + 1);
        if path.len() > 1 && !is_rest {
            let kind = if self.tokens.is_sign(next, '!') && !self.tokens.is_sign(next + 1, '=') {
                Kind::Macro
            } else {
                Kind::Code
            };
            let at = self.place(module, at);
            self.source.mentions.push(Mention { at, path, kind });
        }
        next.max(at + 1)
    }

    fn implementation(&mut self, at: usize, module: &[String]) {
        let mut head = at + 1;
        if self.tokens.is_sign(head, '<') {
            head = self.tokens.closing_angle(head) + 1;
        }
        let mut of_trait = false;
        let mut of = Name::new();
        while head < self.tokens.len() && !self.tokens.is_sign(head, '{') && !self.tokens.is_sign(head, ';') {
            match self.tokens.token(head) {
                // `for<'a>` is something else.
                Some(Token::Word(word)) if word == "for" && !self.tokens.is_sign(head + 1, '<') => {
                    of_trait = true;
                    of.clear();
                }
                Some(Token::Word(word)) if word == "where" => break,
                Some(Token::Word(word)) => of.push(word.clone()),
                Some(Token::Sign('<')) => head = self.tokens.closing_angle(head),
                Some(Token::Sign('(' | '[')) => head = self.tokens.closing(head),
                _ => {}
            }
            head += 1;
        }
        while head < self.tokens.len() && !self.tokens.is_sign(head, '{') {
            head += 1;
        }
        let end = self
            .tokens
            .closing(head.min(self.tokens.len()))
            .min(self.tokens.len().saturating_sub(1));
        let at = self.place(module, at);
        let lines = self.tokens.line(end) + 1 - at.line;
        let (functions, own_calls) = self.functions(head.min(end)..end, module);
        self.source.impls.push(Impl {
            at,
            of,
            of_trait,
            lines,
            functions,
            own_calls,
        });
    }

    /// The functions of a block, and those of its own type that it calls.
    fn functions(&self, block: Range<usize>, module: &[String]) -> (Vec<String>, Vec<(String, Place)>) {
        let (mut functions, mut calls) = (Vec::new(), Vec::new());
        for at in block {
            let Some(name) = self.tokens.token(at).and_then(Token::word) else {
                continue;
            };
            let before = |word: &str| at > 1 && self.tokens.is_word(at - 2, word);
            let dotted = at > 0 && self.tokens.is_sign(at - 1, '.') && before("self");
            let of_type =
                at > 0 && self.tokens.token(at - 1) == Some(&Token::PathSeparator) && before("Self");
            if at > 0 && self.tokens.is_word(at - 1, "fn") {
                functions.push(name.to_owned());
            } else if of_type
                || (dotted && (self.tokens.is_sign(at + 1, '(') || self.tokens.is_turbofish(at + 1)))
            {
                calls.push((name.to_owned(), self.place(module, at)));
            }
        }
        (functions, calls)
    }

    fn definition(&mut self, at: usize, module: &[String]) {
        // `union` is a name elsewhere.
        let Some(name) = self.tokens.token(at + 1).and_then(Token::word).map(str::to_owned) else {
            return;
        };
        self.source.types.insert((module.to_vec(), name.clone()));
        if !self.tokens.is_word(at, "struct") {
            return;
        }
        let mut open = at + 2;
        if self.tokens.is_sign(open, '<') {
            open = self.tokens.closing_angle(open) + 1;
        }
        while open < self.tokens.len() && !"({;".contains(self.tokens.sign(open)) {
            open += 1;
        }
        let fields = if self.tokens.is_sign(open, ';') {
            0
        } else {
            self.tokens.fields(open + 1..self.tokens.closing(open))
        };
        let at = self.place(module, at);
        self.source.structs.push(Struct { at, name, fields });
    }
}
