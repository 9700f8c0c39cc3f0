//! A guest's agent as tests want it: it says what they tell it to.

use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use vmm_dedup_agent_wire::VERSION;
use vmm_dedup_agent_wire::block::Frames;
use vmm_dedup_agent_wire::frame::{BLOCK, Block, Stretch};
use vmm_dedup_agent_wire::message::{
    BlocksBuilder, Hello, Mark, Message, NOTHING, Sources, StretchesBuilder,
};
use vmm_dedup_agent_wire::said::{Kind, Said, Temperature};
use vmm_dedup_agent_wire::stream::Stream;

const PATIENCE: Duration = Duration::from_secs(20);

/// A guest's agent.
#[derive(Debug)]
pub struct Agent {
    stream: UnixStream,
    number: u32,
    heard: Vec<String>,
    serial: u32,
    /// The guest's first frame.
    first: u64,
}

impl Agent {
    /// Connects to a service, of a guest whose memory begins at a physical address, and is welcomed.
    ///
    /// # Panics
    /// If it is not, as all of these functions do if the service does not do what it should.
    #[must_use]
    pub fn greet(stream: UnixStream, sources: Sources, guest: u64) -> Self {
        let mut agent = Self::new(stream, guest);
        agent.say(&hello(sources));
        agent.listen_for("Welcome", || ());
        agent
    }

    /// As [`Self::greet`], by the service's socket; `None` if the service does not let it in now.
    ///
    /// # Panics
    /// If what comes is no message.
    #[must_use]
    pub fn try_greet(socket: &Path, sources: Sources, guest: u64) -> Option<Self> {
        let mut agent = Self::new(UnixStream::connect(socket).ok()?, guest);
        let mut bytes = Vec::new();
        hello(sources).encode(agent.number, &mut bytes);
        agent.number += 1;
        agent.stream.write_all(&bytes).ok()?;
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) {
            let mut bytes = [0; 4096];
            match agent.stream.read(&mut bytes) {
                Ok(0) => return None,
                Ok(count) => agent.take(&bytes[..count]),
                Err(error) if is_not_now(&error) => {}
                Err(_) => return None,
            }
            if agent.has_heard("Welcome") {
                return Some(agent);
            }
        }
        None
    }

    fn new(stream: UnixStream, guest: u64) -> Self {
        let first = guest / 4096;
        assert!(first.is_multiple_of(BLOCK as u64));
        stream
            .set_read_timeout(Some(Duration::from_millis(20)))
            .expect("a timeout");
        Self {
            stream,
            number: 0,
            heard: Vec::new(),
            serial: 0,
            first,
        }
    }

    /// Says something.
    ///
    /// # Panics
    /// If nobody listens.
    pub fn say(&mut self, message: &Message<'_>) {
        let mut bytes = Vec::new();
        message.encode(self.number, &mut bytes);
        self.number += 1;
        self.stream.write_all(&bytes).expect("the service listens");
    }

    /// Says this of frames of the guest's memory, whose pages begin at a block.
    ///
    /// # Panics
    /// If nobody listens.
    pub fn say_of(&mut self, pages: Range<usize>, said: Said) {
        let mut builder = BlocksBuilder::default();
        for block in pages.start / BLOCK..pages.end.div_ceil(BLOCK) {
            let mut frames: Frames = NOTHING;
            for (place, frame) in (0..).zip(&mut frames) {
                if pages.contains(&(block * BLOCK + place)) {
                    *frame = said;
                }
            }
            builder.push(
                Block::try_new(self.first / BLOCK as u64 + block as u64).expect("a block"),
                &frames,
            );
        }
        self.say(&Message::Blocks(builder.list()));
    }

    /// Says of frames of programs when they were used, as all there is.
    ///
    /// # Panics
    /// If nobody listens.
    pub fn say_use(&mut self, snapshot: u32, used: &[(Range<usize>, Temperature)]) {
        self.say(&Message::Begin { snapshot, blocks: 0 });
        for (pages, temperature) in used {
            let said = Said::new(Kind::Anonymous).with_temperature(*temperature);
            self.say_of(pages.clone(), said);
        }
        self.say(&Message::End {
            snapshot,
            all_marks: true,
        });
    }

    /// Marks frames; the mark's serial.
    ///
    /// # Panics
    /// If nobody listens.
    pub fn mark(&mut self, pages: Range<usize>, mark: Mark, set: bool) -> u32 {
        let mut stretches = StretchesBuilder::default();
        let (first, count) = (self.first + pages.start as u64, pages.len() as u64);
        stretches.push(Stretch::try_new(first, count).expect("frames"));
        self.serial += 1;
        self.say(&Message::Marks {
            serial: self.serial,
            mark,
            set,
            stretches: stretches.list(),
        });
        self.serial
    }

    /// Hears what has come.
    ///
    /// # Panics
    /// If that is no message.
    pub fn listen(&mut self) {
        let mut bytes = [0; 4096];
        match self.stream.read(&mut bytes) {
            Ok(count) => self.take(&bytes[..count]),
            Err(error) if is_not_now(&error) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        let heard = &mut self.heard;
        Stream::default()
            .take(bytes, |header, payload| {
                heard.push(format!("{:?}", Message::parse(header.kind, payload)?));
                Ok::<(), vmm_dedup_agent_wire::Malformed>(())
            })
            .expect("answers are well formed");
    }

    fn has_heard(&self, what: &str) -> bool {
        self.heard.iter().any(|heard| heard.starts_with(what))
    }

    /// Waits until it has heard something that begins so.
    ///
    /// # Panics
    /// If it does not come.
    pub fn listen_for(&mut self, what: &str, mut meanwhile: impl FnMut()) {
        let start = Instant::now();
        while !self.has_heard(what) {
            assert!(start.elapsed() < PATIENCE, "no {what}: {:?}", self.heard);
            meanwhile();
            self.listen();
        }
    }
}

fn hello(sources: Sources) -> Message<'static> {
    Message::Hello(Hello {
        lowest: VERSION,
        highest: VERSION,
        sources,
        boot: [7; 16],
        run: 1,
        blocks: 1 << 20,
    })
}

fn is_not_now(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
