//! An agent that attacks: what a guest's root could send and how he could come, to the socket to which the VMM leads him.
#![allow(clippy::cast_possible_truncation)] // numbers at random

use crate::random::Random;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup_agent_wire::block::Frames;
use vmm_dedup_agent_wire::frame::{BLOCK, Block, Stretch};
use vmm_dedup_agent_wire::message::{
    BlocksBuilder, HEADER, Hello, MARK_COST, MOST_PAYLOAD, Mark, Message, NOTHING, Pressure, Sources,
    StretchesBuilder,
};
use vmm_dedup_agent_wire::said::{Kind, Said};
use vmm_dedup_agent_wire::stream::Stream;
use vmm_dedup_agent_wire::{Malformed, VERSION};

/// How it attacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Play {
    /// Says something else of each block, as fast as credit allows, in as few bytes as there are: most work for each byte.
    Flood,
    /// Sends what it may as fast as the socket takes it, whatever the credit.
    Overrun,
    /// Says anything of frames anywhere, within memory and far beyond, each frame by itself.
    RandomFrames,
    /// Marks, and calls free, clean or dirty what is not; begins and ends snapshots; leaves out numbers.
    Lies,
    /// Begins a long message, and sends it byte by byte, or parts in the middle of one.
    HalfMessages,
    /// Bytes at random, with a greeting before them and without.
    Noise,
    /// Comes and goes at once, while another one sends a byte now and then, so that the service has to look each time.
    Reconnects,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// Connections that the socket took, whether or not the service let them in.
    pub connections: u64,
    /// Those of them on which the service welcomed somebody.
    pub welcomed: u64,
    /// Bytes that the socket took.
    pub bytes: u64,
}

impl Play {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Flood,
        Self::Overrun,
        Self::RandomFrames,
        Self::Lies,
        Self::HalfMessages,
        Self::Noise,
        Self::Reconnects,
    ];

    /// Attacks the service that listens at `socket`, of a guest that has so many blocks from frame 0 on, until that is enough.
    pub fn play(self, socket: &Path, blocks: u64, is_enough: impl Fn(&Done) -> bool) -> Done {
        let mut attacker = Attacker {
            socket,
            blocks,
            random: Random(self as u64 + 1),
            round: 0,
            done: Done::default(),
        };
        match self {
            Self::Reconnects => attacker.reconnect(is_enough),
            _ => {
                while !is_enough(&attacker.done) {
                    attacker.come(self, &is_enough);
                }
            }
        }
        attacker.done
    }
}

struct Attacker<'a> {
    socket: &'a Path,
    blocks: u64,
    random: Random,
    round: u64,
    done: Done,
}

/// A connection.
struct Line {
    stream: UnixStream,
    heard: Stream,
    number: u32,
    is_welcome: bool,
    credit: u64,
    used: u64,
}

impl Line {
    fn connect(socket: &Path) -> Option<Self> {
        let stream = UnixStream::connect(socket).ok()?;
        stream.set_nonblocking(true).ok()?;
        Some(Self {
            stream,
            heard: Stream::default(),
            number: 0,
            is_welcome: false,
            credit: 4096,
            used: 0,
        })
    }

    /// Hears what has come; `false` if the service has closed.
    fn listen(&mut self) -> bool {
        let mut bytes = [0; 4096];
        match self.stream.read(&mut bytes) {
            Ok(0) => false,
            Ok(count) => {
                let (is_welcome, most) = (&mut self.is_welcome, &mut self.credit);
                let each = |header: vmm_dedup_agent_wire::message::Header, payload: &[u8]| {
                    match Message::parse(header.kind, payload)? {
                        Message::Welcome { credit, .. } => (*is_welcome, *most) = (true, credit),
                        Message::Grant { credit } => *most = credit,
                        _ => {}
                    }
                    Ok::<(), Malformed>(())
                };
                self.heard.take(&bytes[..count], each).is_ok()
            }
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    /// Sends all of it, as the socket takes it; `false` if nobody does, or not within a moment.
    fn send(&mut self, mut bytes: &[u8], done: &mut Done) -> bool {
        let start = Instant::now();
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(count) => {
                    done.bytes += count as u64;
                    bytes = &bytes[count..];
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if start.elapsed() > Duration::from_secs(1) {
                        return false;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(_) => return false,
            }
        }
        true
    }

    fn say(&mut self, message: &Message<'_>, more_cost: u64, done: &mut Done) -> bool {
        let mut bytes = Vec::new();
        message.encode(self.number, &mut bytes);
        self.number = self.number.wrapping_add(1);
        self.used += bytes.len() as u64 + more_cost;
        self.send(&bytes, done)
    }

    /// Greets, and waits for a welcome: longer than the service lets nobody in after it has refused somebody.
    fn greet(&mut self, done: &mut Done) -> bool {
        let hello = Message::Hello(Hello {
            lowest: VERSION,
            highest: VERSION,
            sources: Sources(Sources::FLAGS | Sources::IDLE),
            boot: [13; 16],
            run: 13,
            blocks: u32::MAX,
        });
        let start = Instant::now();
        let mut goes_on = self.say(&hello, 0, done);
        while goes_on && !self.is_welcome && start.elapsed() < Duration::from_secs(3) {
            goes_on = self.listen();
            std::thread::sleep(Duration::from_millis(1));
        }
        done.welcomed += u64::from(self.is_welcome);
        self.is_welcome
    }

    /// The header of a message of blocks, as long as one may be.
    fn begin_long_message(&mut self, done: &mut Done) -> bool {
        const LENGTH: [u8; 2] = (MOST_PAYLOAD as u16).to_le_bytes();
        let header = [LENGTH[0], LENGTH[1], 3, VERSION];
        let number = self.number.to_le_bytes();
        self.send(&[header, number].concat(), done)
    }

    fn left(&self) -> u64 {
        self.credit.saturating_sub(self.used)
    }
}

impl Attacker<'_> {
    fn below(&mut self, end: u64) -> u64 {
        (self.random.next() << 31 | self.random.next()) % end
    }

    fn connect(&mut self) -> Option<Line> {
        let line = Line::connect(self.socket);
        self.done.connections += u64::from(line.is_some());
        line
    }

    /// One connection, for as long as it holds.
    fn come(&mut self, play: Play, is_enough: &impl Fn(&Done) -> bool) {
        let Some(mut line) = self.connect() else { return };
        self.round += 1;
        let greets = play != Play::Noise || self.round.is_multiple_of(2);
        if greets && !line.greet(&mut self.done) {
            // Not let in: the next try soon.
            std::thread::sleep(Duration::from_millis(50));
            return;
        }
        while !is_enough(&self.done) && line.listen() && self.act(play, &mut line) {}
    }

    fn act(&mut self, play: Play, line: &mut Line) -> bool {
        match play {
            Play::Flood => self.tell_blocks(line, true, false),
            Play::Overrun => self.tell_blocks(line, false, false),
            Play::RandomFrames => self.tell_blocks(line, true, true),
            Play::Lies => self.lie(line),
            Play::HalfMessages => self.tell_half(line),
            Play::Noise | Play::Reconnects => self.make_noise(line),
        }
    }

    /// A message of blocks.
    fn tell_blocks(&mut self, line: &mut Line, keeps_credit: bool, at_random: bool) -> bool {
        if keeps_credit && line.left() < (HEADER + MOST_PAYLOAD) as u64 {
            std::thread::sleep(Duration::from_millis(1));
            return true;
        }
        self.round += 1;
        let mut builder = BlocksBuilder::default();
        let mut number = 0;
        while builder.has_room() {
            let frames = if at_random {
                self.any_frames()
            } else {
                [Said::new([Kind::Free, Kind::FileClean, Kind::Anonymous][(self.round % 3) as usize]); BLOCK]
            };
            number += match at_random {
                true => self.below(self.blocks * 2 + number / 2),
                false => 0,
            };
            match Block::try_new(number) {
                Ok(block) if number < self.blocks || at_random => builder.push(block, &frames),
                _ => break,
            }
            number += 1;
        }
        line.say(&Message::Blocks(builder.list()), 0, &mut self.done)
    }

    fn any_frames(&mut self) -> Frames {
        std::array::from_fn(|_| {
            let bits = (self.random.next() >> 8) as u8;
            Said::from_bits(bits & 0x7f).unwrap_or(Said::UNKNOWN)
        })
    }

    fn lie(&mut self, line: &mut Line) -> bool {
        if line.left() < 64 << 10 {
            std::thread::sleep(Duration::from_millis(1));
            return line.say(&Message::Pressure(Pressure::default()), 0, &mut self.done);
        }
        self.round += 1;
        match self.below(16) {
            0 => {
                let snapshot = self.round as u32;
                let all_marks = self.below(2) == 0;
                line.say(&Message::End { snapshot, all_marks }, 0, &mut self.done)
            }
            // The next message has not the number that is expected.
            1 => {
                line.number = line.number.wrapping_add(77);
                true
            }
            2..9 => self.mark(line),
            _ => {
                let first = self.below(self.blocks);
                let count = 1 + self.below(self.blocks - first);
                let said = Said::from_bits((self.below(6)) as u8).unwrap_or(Said::UNKNOWN);
                let mut builder = BlocksBuilder::default();
                for number in first..first + count {
                    let mut frames = NOTHING;
                    let from = self.below(BLOCK as u64) as usize;
                    frames[from..].fill(said);
                    match Block::try_new(number) {
                        Ok(block) if builder.has_room() => builder.push(block, &frames),
                        _ => break,
                    }
                }
                line.say(&Message::Blocks(builder.list()), 0, &mut self.done)
            }
        }
    }

    fn mark(&mut self, line: &mut Line) -> bool {
        let frames = self.blocks * BLOCK as u64;
        let first = self.below(frames);
        // Beyond memory as well, as much as can be paid.
        let count = 1 + self.below((frames * 2).min(1000 * BLOCK as u64));
        let Ok(stretch) = Stretch::try_new(first, count) else {
            return true;
        };
        let mut builder = StretchesBuilder::default();
        builder.push(stretch);
        let marks = Message::Marks {
            serial: self.round as u32,
            mark: Mark::ALL[self.below(3) as usize],
            set: self.below(3) > 0,
            stretches: builder.list(),
        };
        line.say(&marks, stretch.blocks() * MARK_COST, &mut self.done)
    }

    fn tell_half(&mut self, line: &mut Line) -> bool {
        if !line.begin_long_message(&mut self.done) {
            return false;
        }
        // Every third one parts in the middle.
        let most = if self.round.is_multiple_of(3) { 100 } else { 1000 };
        for _ in 0..most {
            std::thread::sleep(Duration::from_millis(1));
            if !line.listen() || !line.send(&[0], &mut self.done) {
                break;
            }
        }
        false
    }

    fn make_noise(&mut self, line: &mut Line) -> bool {
        let length = 1 + self.below(4096);
        let noise: Vec<u8> = (0..length).map(|_| (self.random.next() >> 8) as u8).collect();
        line.send(&noise, &mut self.done)
    }

    /// Comes and goes, with a greeting and without.
    fn reconnect(&mut self, is_enough: impl Fn(&Done) -> bool) {
        let has_ended = AtomicBool::new(false);
        let socket = self.socket;
        std::thread::scope(|scope| {
            scope.spawn(|| dribble(socket, &has_ended));
            while !is_enough(&self.done) {
                let Some(mut line) = self.connect() else { continue };
                if self.done.connections.is_multiple_of(4) {
                    // Nobody may take it.
                    let _ = line.send(&[0; 8], &mut self.done);
                }
            }
            has_ended.store(true, Ordering::Release);
        });
    }
}

/// Is welcomed as often as the service lets anybody in, and sends a byte every other millisecond.
fn dribble(socket: &Path, has_ended: &AtomicBool) {
    let mut done = Done::default();
    while !has_ended.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(20));
        let Some(mut line) = Line::connect(socket) else {
            continue;
        };
        if !line.greet(&mut done) || !line.begin_long_message(&mut done) {
            continue;
        }
        while !has_ended.load(Ordering::Acquire) && line.listen() && line.send(&[0], &mut done) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
