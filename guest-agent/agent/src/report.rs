//! What `--print` prints.

use std::fmt;
use vmm_dedup_agent_wire::block::Frames;
use vmm_dedup_agent_wire::message::Pressure;
use vmm_dedup_agent_wire::said::{Kind, Temperature};

/// Frames by what is said of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    kinds: [u64; 6],
    temperatures: [u64; 4],
    huge: u64,
    several: u64,
}

impl Report {
    /// Counts a block.
    pub fn add(&mut self, frames: &Frames) {
        for said in frames {
            self.kinds[said.kind() as usize] += 1;
            if !matches!(said.kind(), Kind::Unknown | Kind::Free) {
                self.temperatures[said.temperature() as usize] += 1;
            }
            self.huge += u64::from(said.is_huge());
            self.several += u64::from(said.is_several());
        }
    }

    /// Frames of a kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> u64 {
        self.kinds[kind as usize]
    }

    /// The lines that are printed.
    #[must_use]
    pub fn text(&self, pressure: Pressure) -> String {
        format!(
            "{self}stalls         {:>5}.{:02} % some, {}.{:02} % full\n",
            pressure.some / 100,
            pressure.some % 100,
            pressure.full / 100,
            pressure.full % 100
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let temperature = |t: Temperature| self.temperatures[t as usize];
        for (name, frames) in [
            ("free", self.of(Kind::Free)),
            ("file, clean", self.of(Kind::FileClean)),
            ("file, dirty", self.of(Kind::FileDirty)),
            ("anonymous", self.of(Kind::Anonymous)),
            ("kernel", self.of(Kind::Kernel)),
            ("huge", self.huge),
            ("mapped often", self.several),
            ("hot", temperature(Temperature::Hot)),
            ("warm", temperature(Temperature::Warm)),
            ("cold", temperature(Temperature::Cold)),
        ] {
            writeln!(f, "{name:<14} {frames:>10} frames {:>8} MiB", frames / 256)?;
        }
        Ok(())
    }
}
