//! The tokens of a file, and what can be told of some of them alone: where brackets close and items end, what attributes say.

use crate::tokens::{Placed, Token};
use std::ops::Range;

/// The tokens of one file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream<'a>(pub(crate) &'a [Placed]);

impl Stream<'_> {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The line of a token that is there.
    pub(crate) fn line(&self, at: usize) -> usize {
        self.0[at].line
    }

    pub(crate) fn token(&self, at: usize) -> Option<&Token> {
        self.0.get(at).map(|placed| &placed.token)
    }

    pub(crate) fn is_word(&self, at: usize, word: &str) -> bool {
        self.token(at).is_some_and(|token| token.is_word(word))
    }

    pub(crate) fn is_sign(&self, at: usize, sign: char) -> bool {
        self.token(at).is_some_and(|token| token.is_sign(sign))
    }

    /// Where the bracket at `open` is closed, or the end.
    pub(crate) fn closing(&self, open: usize) -> usize {
        let mut depth = 0usize;
        for at in open..self.0.len() {
            match self.token(at) {
                Some(Token::Sign('(' | '[' | '{')) => depth += 1,
                Some(Token::Sign(')' | ']' | '}')) => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        return at;
                    }
                }
                _ => {}
            }
        }
        self.0.len()
    }

    /// Whether a predicate of `cfg` holds in tests only; whatever is not known may hold elsewhere.
    pub(crate) fn only_in_tests(&self, at: usize) -> bool {
        let parts = || {
            let close = self.closing(at + 1);
            let mut starts = vec![at + 2];
            let mut next = at + 2;
            while next < close {
                if self.is_sign(next, '(') {
                    next = self.closing(next);
                } else if self.is_sign(next, ',') && next + 1 < close {
                    starts.push(next + 1);
                }
                next += 1;
            }
            starts
        };
        match self.token(at).and_then(Token::word) {
            Some("test") => true,
            Some("all") => parts().into_iter().any(|part| self.only_in_tests(part)),
            Some("any") => parts().into_iter().all(|part| self.only_in_tests(part)),
            _ => false,
        }
    }

    pub(crate) fn attribute(&self, range: Range<usize>) -> Attributes {
        let words: Vec<&str> = self.0[range.clone()]
            .iter()
            .filter_map(|placed| placed.token.word())
            .collect();
        let text = self.0[range.clone()]
            .iter()
            .find_map(|placed| match &placed.token {
                Token::Text(text) => Some(text.clone()),
                _ => None,
            });
        let is_cfg = words.first() == Some(&"cfg");
        Attributes {
            test: words == ["test"] || (is_cfg && self.only_in_tests(range.start + 2)),
            path: text.filter(|_| words == ["path"]),
        }
    }

    /// Where an item ends that is left out: behind its `;` or its braces, or for a field or an arm behind the comma.
    pub(crate) fn end_of_item(&self, start: usize, end: usize) -> usize {
        let is_item = |at: usize| {
            let word = self.token(at).and_then(Token::word);
            word.is_some_and(|word| ITEMS.contains(&word))
        };
        let mut at = start;
        while self.is_word(at, "pub") {
            at += 1;
            if self.is_sign(at, '(') {
                at = self.closing(at) + 1;
            }
        }
        let (is_item, is_use) = (is_item(at), self.is_word(at, "use"));
        while at < end {
            match self.token(at) {
                Some(Token::Sign(';')) => return at + 1,
                Some(Token::Sign(',')) if !is_item => return at + 1,
                Some(Token::Sign('}')) => return at,
                Some(Token::Sign('(' | '[')) => at = self.closing(at),
                Some(Token::Sign('{')) => {
                    at = self.closing(at);
                    if !is_use {
                        return at + 1;
                    }
                }
                _ => {}
            }
            at += 1;
        }
        end
    }

    /// `impl` also stands in types; as an item it comes behind one, or behind an attribute.
    pub(crate) fn begins_item(&self, at: usize) -> bool {
        let before = at.checked_sub(1).and_then(|before| self.token(before));
        match before {
            None => true,
            Some(Token::Sign(sign)) => ";{}]".contains(*sign),
            Some(token) => token.is_word("unsafe"),
        }
    }

    /// `::<`
    pub(crate) fn is_turbofish(&self, at: usize) -> bool {
        self.token(at) == Some(&Token::PathSeparator) && self.is_sign(at + 1, '<')
    }

    pub(crate) fn closing_angle(&self, open: usize) -> usize {
        let mut depth = 0usize;
        for at in open..self.0.len() {
            match self.token(at) {
                Some(Token::Sign('<')) => depth += 1,
                Some(Token::Sign('>')) => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        return at;
                    }
                }
                _ => {}
            }
        }
        self.0.len()
    }

    pub(crate) fn sign(&self, at: usize) -> char {
        match self.token(at) {
            Some(Token::Sign(sign)) => *sign,
            _ => ' ',
        }
    }

    /// Number of parts between commas.
    pub(crate) fn fields(&self, range: Range<usize>) -> usize {
        let (mut fields, mut empty, mut at) = (0, true, range.start);
        while at < range.end {
            match self.token(at) {
                Some(Token::Sign(',')) => {
                    fields += usize::from(!empty);
                    empty = true;
                }
                Some(Token::Sign('#')) => at = self.closing(at + 1),
                token => {
                    empty = false;
                    match token {
                        Some(Token::Sign('(' | '[' | '{')) => at = self.closing(at),
                        Some(Token::Sign('<')) => at = self.closing_angle(at),
                        _ => {}
                    }
                }
            }
            at += 1;
        }
        fields + usize::from(!empty)
    }
}

/// What begins an item, and not a field or an arm.
const ITEMS: [&str; 16] = [
    "async",
    "const",
    "enum",
    "extern",
    "fn",
    "impl",
    "let",
    "macro_rules",
    "mod",
    "static",
    "struct",
    "trait",
    "type",
    "union",
    "unsafe",
    "use",
];

/// What attributes say of the item behind them.
#[derive(Debug, Default)]
pub(crate) struct Attributes {
    /// It is compiled for tests only.
    pub(crate) test: bool,
    /// `#[path = "..."]`
    pub(crate) path: Option<String>,
}

impl Attributes {
    pub(crate) fn add(&mut self, other: Self) {
        self.test |= other.test;
        self.path = self.path.take().or(other.path);
    }
}
