//! `{name}` and `{index}` in a fleet file's strings: what makes the VMs of one entry differ.

/// One VM's values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values<'a> {
    pub(crate) name: &'a str,
    /// Position within its entry, from 0.
    pub(crate) index: u32,
}

impl Values<'_> {
    /// Replaces `{name}`, `{index}`, `{index+N}`, each number also as `{...:WIDTH}` (zero-padded) or `{...:WIDTHx}`
    /// (hexadecimal). `{{` and `}}` are braces.
    ///
    /// # Errors
    /// A text that names what is not understood.
    pub(crate) fn fill(self, text: &str) -> Result<String, String> {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                out.push_str(brace);
                rest = after;
                continue;
            }
            let end = rest.find('}').filter(|_| brace == "{");
            let end =
                end.ok_or_else(|| format!("{text:?} has a lone {brace:?}: write {{{{ or }}}} for a brace"))?;
            out.push_str(&self.value(&rest[..end])?);
            rest = &rest[end + 1..];
        }
        out.push_str(rest);
        Ok(out)
    }

    fn value(self, placeholder: &str) -> Result<String, String> {
        let unknown = || {
            format!(
                "{{{placeholder}}} is not known: there are {{name}}, {{index}}, {{index+100}} and {{index:02x}}; write {{{{ for a brace"
            )
        };
        if placeholder == "name" {
            return Ok(self.name.to_owned());
        }
        let (number, format) = placeholder.split_once(':').unwrap_or((placeholder, ""));
        let added = match number.strip_prefix("index").ok_or_else(unknown)? {
            "" => 0,
            offset => offset
                .strip_prefix('+')
                .and_then(|n| n.parse::<u32>().ok())
                .ok_or_else(unknown)?,
        };
        let number = u64::from(self.index) + u64::from(added);
        let (width, hexadecimal) = match format.strip_suffix('x') {
            Some(width) => (width, true),
            None => (format, false),
        };
        let width = match width {
            "" => 0,
            width => width
                .parse::<usize>()
                .ok()
                .filter(|w| *w <= 16)
                .ok_or_else(unknown)?,
        };
        Ok(if hexadecimal {
            format!("{number:0width$x}")
        } else {
            format!("{number:0width$}")
        })
    }

    /// As [`Self::fill`], for every string in a value.
    pub(crate) fn fill_all(self, value: &toml::Value) -> Result<toml::Value, String> {
        Ok(match value {
            toml::Value::String(text) => toml::Value::String(self.fill(text)?),
            toml::Value::Array(items) => {
                toml::Value::Array(items.iter().map(|v| self.fill_all(v)).collect::<Result<_, _>>()?)
            }
            toml::Value::Table(table) => toml::Value::Table(self.fill_table(table)?),
            other => other.clone(),
        })
    }

    /// As [`Self::fill_all`].
    pub(crate) fn fill_table(self, table: &toml::Table) -> Result<toml::Table, String> {
        let filled = table
            .iter()
            .map(|(key, value)| Ok((key.clone(), self.fill_all(value)?)));
        filled.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: Values<'_> = Values {
        name: "web-11",
        index: 11,
    };

    #[test]
    fn names_and_numbers_are_filled_in() {
        for (text, expected) in [
            ("plain", "plain"),
            ("/disks/{name}.raw", "/disks/web-11.raw"),
            ("52:54:00:00:01:{index:02x}", "52:54:00:00:01:0b"),
            ("{index+100}/{index:4}/{index:x}", "111/0011/b"),
            ("{{name}} {{}}", "{name} {}"),
            ("{name}{index}", "web-1111"),
        ] {
            assert_eq!(VM.fill(text).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for bad in [
            "{nam}",
            "{index-1}",
            "{index+}",
            "{index:99}",
            "{index:2y}",
            "{index+99999999999}",
            "{}",
        ] {
            let error = VM.fill(bad).unwrap_err();
            assert!(error.starts_with(bad) && error.contains("{index:02x}"), "{error}");
        }
        for bad in ["{name", "name}", "{"] {
            assert!(VM.fill(bad).unwrap_err().contains("lone"), "{bad}");
        }
    }
}
