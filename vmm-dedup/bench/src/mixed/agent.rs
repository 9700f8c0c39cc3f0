//! An agent of plain memory, which knows what the accessing thread does: what is hot, warm and cold.
//!
//! A real one sees of a frame only whether it was used within an interval. What this one tells is the best that any could.

use super::parts::Parts;
use super::setup::Setup;
use crate::content::HUGE_PAGES;
use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tempfile::TempDir;
use vmm_dedup::{AgentSocket, UseSource};
use vmm_dedup_agent_wire::frame::{BLOCK, Block};
use vmm_dedup_agent_wire::message::{BlocksBuilder, Hello, Message, Pressure, Sources};
use vmm_dedup_agent_wire::said::{Kind, Said, Temperature};
use vmm_dedup_agent_wire::{PORT, VERSION};
use vmm_dedup_host::{Failure, note};

/// Between two tries to reach the service.
const AGAIN: Duration = Duration::from_millis(100);

/// Which pages are hot; `None` at the end.
type Hot<'a> = &'a dyn Fn() -> Option<Range<usize>>;

/// An agent, if one is to speak: the folder of its socket.
pub(super) struct Agent(Option<TempDir>);

impl Agent {
    pub(super) fn try_new(setup: &Setup<'_>) -> Result<Self, Failure> {
        let is_asked = setup.use_source == UseSource::Agent;
        let folder = is_asked.then(tempfile::tempdir).transpose();
        folder
            .map(Self)
            .map_err(|e| Failure::new(format!("no folder for the agent's socket: {e}")))
    }

    pub(super) fn speaks(&self) -> bool {
        self.0.is_some()
    }

    /// Where the service listens.
    pub(super) fn socket(&self) -> Option<AgentSocket> {
        let folder = self.0.as_ref()?;
        Some(AgentSocket::Hybrid(folder.path().join("vsock")))
    }

    /// Tells each interval how memory is used, as long as something says which pages are hot.
    pub(super) fn tell(&self, setup: &Setup<'_>, chunks: usize, hot: Hot<'_>, parts: &Parts) {
        let Some(folder) = &self.0 else { return };
        let path = folder.path().join(format!("vsock_{PORT}"));
        let interval = Duration::from_millis(setup.interval_ms);
        while hot().is_some() {
            if let Ok(stream) = UnixStream::connect(&path)
                && let Err(error) = (Line { stream, number: 0 }).tell(chunks, hot, parts, interval)
            {
                note!("the agent has to connect again: {error}");
            }
            std::thread::sleep(AGAIN);
        }
    }
}

struct Line {
    stream: UnixStream,
    number: u32,
}

impl Line {
    fn tell(
        &mut self,
        chunks: usize,
        hot: Hot<'_>,
        parts: &Parts,
        interval: Duration,
    ) -> std::io::Result<()> {
        let blocks = u32::try_from(chunks).unwrap_or(u32::MAX);
        self.say(&Message::Hello(Hello {
            lowest: VERSION,
            highest: VERSION,
            sources: Sources(Sources::FLAGS | Sources::IDLE),
            boot: [1; 16],
            run: 1,
            blocks,
        }))?;
        // Its answer, the welcome: nothing is to be said before.
        self.stream.read_exact(&mut [0; 1])?;
        self.stream.set_nonblocking(true)?;
        let mut told: Vec<Option<Temperature>> = vec![None; blocks as usize];
        self.say(&Message::Begin { snapshot: 1, blocks })?;
        let mut is_first = true;
        while let Some(hot) = hot() {
            let mut changed = false;
            let mut builder = BlocksBuilder::default();
            for (block, told) in told.iter_mut().enumerate() {
                let temperature = temperature(&hot, parts, block);
                // What is as it was is not told again.
                if told.replace(temperature) != Some(temperature) {
                    let said = Said::new(Kind::Anonymous).with_temperature(temperature);
                    let block = Block::try_new(block as u64).map_err(std::io::Error::other)?;
                    builder.push(block, &[said; BLOCK]);
                    changed = true;
                }
            }
            if changed {
                self.say(&Message::Blocks(builder.list()))?;
            }
            // Who is silent for long is not believed any more.
            self.say(&Message::Pressure(Pressure::default()))?;
            if std::mem::take(&mut is_first) {
                self.say(&Message::End {
                    snapshot: 1,
                    all_marks: true,
                })?;
            }
            self.hear()?;
            std::thread::sleep(interval);
        }
        Ok(())
    }

    fn say(&mut self, message: &Message<'_>) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        message.encode(self.number, &mut bytes);
        self.number += 1;
        self.stream.write_all(&bytes)
    }

    /// Takes what the service says, which is nothing that matters here: there is more credit than is used.
    fn hear(&mut self) -> std::io::Result<()> {
        loop {
            match self.stream.read(&mut [0; 4096]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
    }
}

fn temperature(hot: &Range<usize>, parts: &Parts, block: usize) -> Temperature {
    if hot.contains(&(block * HUGE_PAGES)) {
        Temperature::Hot
    } else if parts.warm.contains(&block) {
        Temperature::Warm
    } else {
        Temperature::Cold
    }
}
