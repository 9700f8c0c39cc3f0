//! Rust source as tokens, without comments: as much of the language as the rooms need.

/// A piece of source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    /// An identifier or keyword; raw ones without `r#`.
    Word(String),
    /// What a string literal holds, escapes as they are written.
    Text(String),
    /// Any other literal, or a lifetime.
    Literal,
    /// `::`
    PathSeparator,
    /// `->` or `=>`: not a bracket.
    Arrow,
    /// Any other character.
    Sign(char),
}

impl Token {
    pub(crate) fn is_word(&self, word: &str) -> bool {
        matches!(self, Self::Word(own) if own == word)
    }

    pub(crate) fn is_sign(&self, sign: char) -> bool {
        *self == Self::Sign(sign)
    }

    pub(crate) fn word(&self) -> Option<&str> {
        match self {
            Self::Word(word) => Some(word),
            _ => None,
        }
    }
}

/// A token and its line, from 1.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) token: Token,
    pub(crate) line: usize,
}

/// Takes source apart. Source that does not compile may come out in any way, but comes to an end.
pub(crate) fn tokens(source: &str) -> Vec<Placed> {
    let mut reader = Reader {
        rest: source,
        line: 1,
    };
    let mut all = Vec::new();
    loop {
        reader.skip_blanks();
        let line = reader.line;
        match reader.next() {
            Some(token) => all.push(Placed { token, line }),
            None => return all,
        }
    }
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
}

impl Reader<'_> {
    /// Takes so many bytes away.
    fn take(&mut self, len: usize) -> String {
        let (taken, rest) = self.rest.split_at(len.min(self.rest.len()));
        self.line += taken.matches('\n').count();
        self.rest = rest;
        taken.to_owned()
    }

    /// Takes characters away while they are of a kind.
    fn take_while(&mut self, of_kind: impl Fn(char) -> bool) -> String {
        let len = self.rest.find(|c| !of_kind(c)).unwrap_or(self.rest.len());
        self.take(len)
    }

    /// White space and comments.
    fn skip_blanks(&mut self) {
        loop {
            let before = self.rest.len();
            self.take_while(char::is_whitespace);
            if self.rest.starts_with("//") {
                self.take_while(|c| c != '\n');
            } else if self.rest.starts_with("/*") {
                self.skip_block_comment();
            }
            if self.rest.len() == before {
                return;
            }
        }
    }

    /// Block comments nest.
    fn skip_block_comment(&mut self) {
        let mut depth = 0;
        while !self.rest.is_empty() {
            if self.rest.starts_with("/*") {
                depth += 1;
                self.take(2);
            } else if self.rest.starts_with("*/") {
                depth -= 1;
                self.take(2);
                if depth == 0 {
                    return;
                }
            } else {
                self.take(self.rest.chars().next().map_or(1, char::len_utf8));
            }
        }
    }

    fn next(&mut self) -> Option<Token> {
        let first = self.rest.chars().next()?;
        if let Some(text) = self.string() {
            return Some(Token::Text(text));
        }
        if first.is_alphabetic() || first == '_' {
            return Some(Token::Word(self.word()));
        }
        if first.is_ascii_digit() {
            self.take_while(|c| c.is_ascii_alphanumeric() || c == '_');
            return Some(Token::Literal);
        }
        if first == '\'' {
            self.character_or_lifetime();
            return Some(Token::Literal);
        }
        for (text, token) in [
            ("::", Token::PathSeparator),
            ("->", Token::Arrow),
            ("=>", Token::Arrow),
        ] {
            if self.rest.starts_with(text) {
                self.take(text.len());
                return Some(token);
            }
        }
        self.take(first.len_utf8());
        Some(Token::Sign(first))
    }

    fn word(&mut self) -> String {
        if self.rest.starts_with("r#") {
            self.take(2);
        }
        self.take_while(|c| c.is_alphanumeric() || c == '_')
    }

    /// A string literal of any kind, if one comes.
    fn string(&mut self) -> Option<String> {
        let prefix = self.rest.find(|c| !"bcr".contains(c))?;
        let after = &self.rest[prefix..];
        let raw = self.rest[..prefix].ends_with('r');
        let hashes = if raw { after.find(|c| c != '#')? } else { 0 };
        // `r#name` is a word, and so is a name that only begins like a prefix.
        if prefix > 2 || !after[hashes..].starts_with('"') {
            return None;
        }
        self.take(prefix + hashes + 1);
        let end = format!("\"{}", "#".repeat(hashes));
        let mut text = String::new();
        while !self.rest.is_empty() {
            if self.rest.starts_with(&end) {
                self.take(end.len());
                break;
            }
            let escaped = !raw && self.rest.starts_with('\\');
            let len: usize = self
                .rest
                .chars()
                .take(1 + usize::from(escaped))
                .map(char::len_utf8)
                .sum();
            text += &self.take(len);
        }
        Some(text)
    }

    fn character_or_lifetime(&mut self) {
        self.take(1);
        let mut ahead = self.rest.chars();
        match (ahead.next(), ahead.next()) {
            (Some('\\'), Some(escaped)) => {
                self.take(1 + escaped.len_utf8());
                self.take_while(|c| c != '\'');
                self.take(1);
            }
            (Some(character), Some('\'')) => {
                self.take(character.len_utf8() + 1);
            }
            _ => {
                self.take_while(|c| c.is_alphanumeric() || c == '_');
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<String> {
        let words = tokens(source);
        words
            .iter()
            .filter_map(|placed| placed.token.word().map(str::to_owned))
            .collect()
    }

    #[test]
    fn comments_and_literals_hold_no_words() {
        let source = r##"a /* b /* c */ d */ "e\"f" // g
            'h' '\'' '\u{1F600}' 'i: b"j" br#"k"l"# r"m" 12e3 n"##;
        assert_eq!(words(source), ["a", "n"]);
    }

    #[test]
    fn words_that_look_like_prefixes_of_strings_are_words() {
        assert_eq!(
            words("crate r#type rb br bcr b"),
            ["crate", "type", "rb", "br", "bcr", "b"]
        );
    }

    #[test]
    fn lines_are_counted_through_comments_and_strings() {
        let all = tokens("/* \n */ \"\n\n\" a");
        assert_eq!((all.len(), all[1].line), (2, 4));
    }

    #[test]
    fn source_that_does_not_compile_comes_to_an_end() {
        for source in ["\"", "'", "/*", "r#\"", "'\\", "b'", "\\"] {
            tokens(source);
        }
    }
}
