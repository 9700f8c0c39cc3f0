//! The guest's report lines, read back: `@payload event key=value ...`.

/// What every report line begins with.
const MARK: &str = "@payload ";

/// Kind of a page access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A first read of a page.
    Read,
    /// A first write to a page.
    Write,
}

/// One event that the guest reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// All pages are filled; the work begins.
    Ready {
        /// Data pages in all.
        pages: u64,
        /// Copies of the initrd's pages.
        files: u64,
        /// Random pages of its own.
        private: u64,
        /// Zero pages.
        zero: u64,
        /// Random pages shared by seed.
        common: u64,
        /// Pages in the working set.
        ws: u64,
        /// The frequency that the guest counts time with.
        tsc_khz: u64,
    },
    /// Progress; the counts are totals.
    Tick {
        /// Time since the work began.
        ms: u64,
        /// Pages written.
        writes: u64,
        /// Pages read and verified on top of those that were written.
        reads: u64,
        /// Pages that got their original content back.
        restores: u64,
        /// Times that the whole working set was written and restored.
        rounds: u64,
        /// Wrong words.
        errors: u64,
        /// The longest access since the last tick.
        max_cycles: u64,
    },
    /// How long accesses to pages took.
    Latency {
        /// Reads or writes.
        kind: Access,
        /// The longest.
        max: u64,
        /// Pairs of n and the number of accesses that took 2^n up to 2^(n+1) cycles.
        histogram: Vec<(u32, u64)>,
    },
    /// The final verification of every page.
    Verify {
        /// Pages verified.
        pages: u64,
        /// Wrong words in the whole run.
        errors: u64,
        /// Writes that the guest's book accounts for.
        writes: u64,
    },
    /// A wrong word; only the first few are reported.
    Bad {
        /// Page number; pages are numbered through files, private, zero, common.
        page: u64,
        /// Word in the page, or none if the initrd itself has changed.
        word: Option<u64>,
        /// What the page must hold.
        want: u64,
        /// What it holds.
        got: u64,
    },
    /// The guest gave its common pages to the host and took them back.
    Balloon {
        /// Pages given; 0 if there is no device that could take them.
        pages: u64,
        /// Words in them that were not zero while the host had them.
        stale: u64,
    },
    /// An answer of the device that the guest was asked to drive.
    Check {
        /// What was checked.
        name: String,
        /// Whether the answer was right.
        ok: bool,
        /// What the device said, as far as it is one number.
        got: u64,
    },
    /// The guest trapped.
    Fault {
        /// The x86 exception.
        vector: u64,
        /// Its error code.
        code: u64,
        /// Where.
        rip: u64,
        /// CR2.
        address: u64,
    },
    /// The guest cannot do what it was asked for.
    Fail {
        /// All that it said about it.
        reason: String,
    },
    /// The end; the guest powers off.
    Done {
        /// Whether every page held what it must and every write was accounted for.
        ok: bool,
    },
}

/// A report line that cannot be understood, for example one that another writer cut in two.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot read the payload's report {line:?}: {problem}; is something else writing to its serial line?"
)]
pub struct ReportError {
    line: String,
    problem: String,
}

impl Report {
    /// Reads one line of serial output; `None` if it is not a report.
    ///
    /// # Errors
    /// If the line is marked as a report but is not a whole one.
    pub fn parse(line: &str) -> Result<Option<Report>, ReportError> {
        let Some(text) = line.trim_end().strip_prefix(MARK) else {
            return Ok(None);
        };
        parse_event(text).map(Some).map_err(|problem| ReportError {
            line: line.to_owned(),
            problem,
        })
    }

    /// Reads all whole lines of serial output.
    ///
    /// # Errors
    /// As for [`Report::parse`].
    pub fn parse_all(output: &str) -> Result<Vec<Report>, ReportError> {
        output
            .lines()
            .filter_map(|line| Report::parse(line).transpose())
            .collect()
    }
}

fn parse_event(text: &str) -> Result<Report, String> {
    let (event, rest) = text.split_once(' ').unwrap_or((text, ""));
    if event == "fail" {
        return Ok(Report::Fail {
            reason: rest.to_owned(),
        });
    }
    let fields = Fields(rest);
    Ok(match event {
        "ready" => Report::Ready {
            pages: fields.number("pages")?,
            files: fields.number("files")?,
            private: fields.number("private")?,
            zero: fields.number("zero")?,
            common: fields.number("common")?,
            ws: fields.number("ws")?,
            tsc_khz: fields.number("tsc_khz")?,
        },
        "tick" => Report::Tick {
            ms: fields.number("ms")?,
            writes: fields.number("writes")?,
            reads: fields.number("reads")?,
            restores: fields.number("restores")?,
            rounds: fields.number("rounds")?,
            errors: fields.number("errors")?,
            max_cycles: fields.number("max_cycles")?,
        },
        "latency" => Report::Latency {
            kind: match fields.text("kind")? {
                "read" => Access::Read,
                "write" => Access::Write,
                other => return Err(format!("unknown kind {other}")),
            },
            max: fields.number("max")?,
            histogram: parse_histogram(fields.text("histogram")?)?,
        },
        "verify" => Report::Verify {
            pages: fields.number("pages")?,
            errors: fields.number("errors")?,
            writes: fields.number("writes")?,
        },
        "bad" => Report::Bad {
            page: fields.number("page")?,
            word: match fields.text("word")? {
                "initrd" => None,
                _ => Some(fields.number("word")?),
            },
            want: fields.number("want")?,
            got: fields.number("got")?,
        },
        "balloon" => Report::Balloon {
            pages: fields.number("pages")?,
            stale: fields.number("stale")?,
        },
        "fault" => Report::Fault {
            vector: fields.number("vector")?,
            code: fields.number("code")?,
            rip: fields.number("rip")?,
            address: fields.number("address")?,
        },
        "check" => Report::Check {
            name: fields.text("name")?.to_owned(),
            ok: fields.status()?,
            got: fields.number("got")?,
        },
        "done" => Report::Done { ok: fields.status()? },
        other => return Err(format!("unknown event {other}")),
    })
}

fn parse_histogram(text: &str) -> Result<Vec<(u32, u64)>, String> {
    if text == "-" {
        return Ok(Vec::new());
    }
    text.split(',')
        .map(|pair| {
            let parsed = pair
                .split_once(':')
                .and_then(|(n, count)| Some((n.parse().ok()?, count.parse().ok()?)));
            parsed.ok_or_else(|| format!("{pair} is not n:count"))
        })
        .collect()
}

struct Fields<'a>(&'a str);

impl<'a> Fields<'a> {
    fn text(&self, key: &str) -> Result<&'a str, String> {
        let mut words = self.0.split(' ').filter_map(|word| word.split_once('='));
        words
            .find(|(name, _)| *name == key)
            .map(|(_, value)| value)
            .ok_or_else(|| format!("{key} is missing"))
    }

    fn status(&self) -> Result<bool, String> {
        match self.text("status")? {
            "ok" => Ok(true),
            "bad" => Ok(false),
            other => Err(format!("unknown status {other}")),
        }
    }

    fn number(&self, key: &str) -> Result<u64, String> {
        let text = self.text(key)?;
        let parsed = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        parsed.map_err(|_| format!("{key}={text} is not a number"))
    }
}
