//! The guest's side of the kernel command line: `key=value`, separated by spaces. A key or a value that is not
//! understood is an error, so that a test cannot run something else than it asked for.

/// Which pages the writes go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkingSet {
    /// Spread evenly over all areas.
    All,
    /// Copies of the initrd.
    Files,
    /// Random pages of this guest's own.
    Private,
    /// Zero pages.
    Zero,
    /// Random pages that every guest with the same `common_seed` has.
    Common,
}

/// What becomes of written pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rewrite {
    /// They stay as they are.
    None,
    /// A pass over the working set writes every page, the next one restores the original content.
    Restore,
}

/// A device that the guest is to drive instead of working on its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// None: it works on its memory.
    None,
    /// A PageForge on PCI.
    PageForge,
}

/// What the guest was asked to do. The host's `PayloadConfig` documents the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Params {
    pub seed: u64,
    pub private_mib: u64,
    pub zero_mib: u64,
    pub common_mib: u64,
    pub common_seed: u64,
    /// Every so manieth page of the common area is this guest's own; 0: none.
    pub own_every: u64,
    pub copies: u64,
    pub ws_pages: u64,
    pub ws_area: WorkingSet,
    pub rate: u64,
    pub reads: u64,
    pub seconds: u64,
    pub max_writes: u64,
    pub rewrite: Rewrite,
    pub rest_ms: u64,
    pub report_ms: u64,
    pub tsc_khz: u64,
    pub spin: bool,
    pub device: Device,
}

/// The word of the command line that was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadWord<'a>(pub &'a str);

impl Params {
    /// What an empty command line means.
    pub const DEFAULT: Params = Params {
        seed: 1,
        private_mib: 8,
        zero_mib: 8,
        common_mib: 0,
        common_seed: 1,
        own_every: 0,
        copies: 1,
        ws_pages: 1024,
        ws_area: WorkingSet::All,
        rate: 10_000,
        reads: 1,
        seconds: 5,
        max_writes: 0,
        rewrite: Rewrite::None,
        rest_ms: 0,
        report_ms: 500,
        tsc_khz: 0,
        spin: false,
        device: Device::None,
    };

    /// Reads a command line.
    pub fn parse(line: &str) -> Result<Params, BadWord<'_>> {
        let mut params = Params::DEFAULT;
        for word in line.split_ascii_whitespace() {
            params.set(word).ok_or(BadWord(word))?;
        }
        Ok(params)
    }

    fn set(&mut self, word: &str) -> Option<()> {
        let (key, value) = word.split_once('=')?;
        let number = match key {
            "ws_area" => {
                self.ws_area = match value {
                    "all" => WorkingSet::All,
                    "files" => WorkingSet::Files,
                    "private" => WorkingSet::Private,
                    "zero" => WorkingSet::Zero,
                    "common" => WorkingSet::Common,
                    _ => return None,
                };
                return Some(());
            }
            "rewrite" => {
                self.rewrite = match value {
                    "none" => Rewrite::None,
                    "restore" => Rewrite::Restore,
                    _ => return None,
                };
                return Some(());
            }
            "idle" => {
                self.spin = match value {
                    "halt" => false,
                    "spin" => true,
                    _ => return None,
                };
                return Some(());
            }
            "device" => {
                self.device = match value {
                    "none" => Device::None,
                    "pageforge" => Device::PageForge,
                    _ => return None,
                };
                return Some(());
            }
            "seed" => &mut self.seed,
            "private_mib" => &mut self.private_mib,
            "zero_mib" => &mut self.zero_mib,
            "common_mib" => &mut self.common_mib,
            "common_seed" => &mut self.common_seed,
            "own_every" => &mut self.own_every,
            "copies" => &mut self.copies,
            "ws_pages" => &mut self.ws_pages,
            "rate" => &mut self.rate,
            "reads" => &mut self.reads,
            "seconds" => &mut self.seconds,
            "max_writes" => &mut self.max_writes,
            "rest_ms" => &mut self.rest_ms,
            "report_ms" => &mut self.report_ms,
            "tsc_khz" => &mut self.tsc_khz,
            _ => return None,
        };
        *number = value.parse().ok()?;
        Some(())
    }
}
