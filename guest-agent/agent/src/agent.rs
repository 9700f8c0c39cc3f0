//! The loop that does it all.

use crate::budget::{Budget, cpu_time};
use crate::classify::classify;
use crate::config::{Address, Config, Use};
use crate::link::{Dialler, Link};
use crate::programs::Programs;
use crate::report::Report;
use crate::source::damon::Damon;
use crate::source::frames::Frames;
use crate::source::idle::Idle;
use crate::source::{Lack, Roots, layout, pressure};
use crate::teller::{Error, Teller, Told};
use crate::walk::{STEP, Walk};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use vmm_dedup_agent_wire::VERSION;
use vmm_dedup_agent_wire::block;
use vmm_dedup_agent_wire::frame::BLOCK;
use vmm_dedup_agent_wire::message::{Hello, Mark, Sources};
use vmm_dedup_agent_wire::said::{Kind, Temperature};

/// How often marked memory is looked for again.
const FOLLOW: Duration = Duration::from_secs(1);
/// How often the service hears of pressure.
const PRESSURE: Duration = Duration::from_secs(5);
/// How long programs have to mark again what they had marked with an agent before.
const GRACE: Duration = Duration::from_secs(60);
/// The longest sleep.
const LONGEST: Duration = Duration::from_secs(60);
/// Bytes that may wait to be written; then nothing more is told.
const MOST_OUT: usize = 32 << 10;

/// What is used to tell when frames were used.
#[derive(Debug)]
enum Usage {
    Idle(Idle),
    Damon(Damon),
    Nothing,
}

/// What is printed, and when it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode {
    /// Ends after one round over memory, which the service, if there is one, has heard.
    pub once: bool,
    /// Prints a summary of each round, and tells no service.
    pub print: bool,
}

/// See the module's text.
#[derive(Debug)]
pub struct Agent {
    roots: Roots,
    config: Config,
    mode: Mode,
    frames: Frames,
    usage: Usage,
    walk: Walk,
    teller: Teller,
    dialler: Option<Dialler>,
    link: Option<Link>,
    programs: Option<Programs>,
    /// This run's random number.
    run: u64,
    start: Instant,
    schedule: Schedule,
    round: Round,
}

/// When what is due, since the start.
#[derive(Clone, Copy, Debug, Default)]
struct Schedule {
    step: Duration,
    follow: Duration,
    pressure: Duration,
}

#[derive(Debug, Default)]
struct Round {
    began: Duration,
    report: Report,
    /// Activity of the guest when it began; a guest that stands still is not looked at.
    activity: u64,
    flags: Vec<u64>,
    counts: Vec<u64>,
}

impl Agent {
    /// Opens all sources; also what is lacking.
    ///
    /// # Errors
    /// [`Lack`]: without frames there is nothing to say.
    pub fn new(roots: Roots, config: Config, mode: Mode) -> Result<(Self, Vec<Lack>), Lack> {
        let memory = layout::blocks(&roots)?;
        let (frames, mut lacks) = Frames::open(&roots)?;
        let usage = usage(&roots, &config, &memory, &mut lacks);
        lacks.extend(pressure::lack(&roots));
        let walk = Walk::new(memory);
        let programs = match config.hints_socket.as_os_str().is_empty() || mode.print {
            true => None,
            false => Programs::listen(&config.hints_socket, config.hints_mib)
                .map_err(|e| {
                    lacks.push(Lack::Other {
                        file: config.hints_socket.display().to_string(),
                        error: e.to_string(),
                        what: "marks of programs",
                    });
                })
                .ok(),
        };
        let dialler = (!mode.print).then(|| Dialler::new(config.address().unwrap_or(Address::Vsock)));
        let teller = Teller::new(walk.end(), walk.blocks().count() as u64);
        let agent = Self {
            roots,
            config,
            mode,
            frames,
            usage,
            walk,
            teller,
            dialler,
            link: None,
            programs,
            run: RandomState::new().hash_one(()),
            start: Instant::now(),
            schedule: Schedule::default(),
            round: Round::default(),
        };
        Ok((agent, lacks))
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn hello(&self) -> Hello {
        let mut sources = Sources::FLAGS;
        let mut add = |is: bool, bit: u32| sources |= if is { bit } else { 0 };
        add(self.frames.has_counts(), Sources::COUNTS);
        add(matches!(self.usage, Usage::Idle(_)), Sources::IDLE);
        add(matches!(self.usage, Usage::Damon(_)), Sources::DAMON);
        add(pressure::lack(&self.roots).is_none(), Sources::PRESSURE);
        add(self.programs.is_some(), Sources::MARKS);
        Hello {
            lowest: VERSION,
            highest: VERSION,
            sources: Sources(sources),
            boot: boot(&self.roots),
            run: self.run,
            blocks: self.walk.end(),
        }
    }

    /// Runs; comes back in [`Mode::once`] only.
    ///
    /// # Errors
    /// The kernel does not tell of frames any more, or there is nobody to tell in [`Mode::once`].
    pub fn run(&mut self) -> io::Result<()> {
        let mut budget = Budget::new(self.config.share, self.now(), cpu_time());
        loop {
            let now = self.now();
            self.connect(now)?;
            self.exchange(now);
            self.serve(now);
            if now >= GRACE {
                self.teller.know_all_marks();
            }
            if now >= self.schedule.pressure {
                self.press(now);
            }
            if now >= self.schedule.step && self.may_step() {
                let ended = self.step(now)?;
                // One round may be had at once.
                let wait = if self.mode.once {
                    Duration::ZERO
                } else {
                    budget.wait(self.now(), cpu_time())
                };
                let now = self.now();
                let at = now + wait;
                self.schedule.step = if ended {
                    at.max(self.round.began + self.config.interval())
                } else {
                    at
                };
                if ended && self.end_round(now) {
                    return self.drain();
                }
            }
            self.exchange(now);
            self.sleep();
        }
    }

    /// Without a service nobody needs to hear; with little room on the connection nobody can.
    fn may_step(&self) -> bool {
        self.mode.print || self.teller.is_welcome() && self.teller.pending() < MOST_OUT
    }

    fn connect(&mut self, now: Duration) -> io::Result<()> {
        let Some(dialler) = self.dialler.as_mut().filter(|_| self.link.is_none()) else {
            return Ok(());
        };
        self.link = dialler.try_to_connect(now);
        if self.link.is_some() {
            let hello = self.hello();
            self.teller.connected(hello);
        } else if self.mode.once && now > Duration::from_secs(10) {
            return Err(io::Error::other("no service listens"));
        }
        Ok(())
    }

    fn exchange(&mut self, now: Duration) {
        let Some(link) = &mut self.link else { return };
        let was_welcome = self.teller.is_welcome();
        let mut buffer = [0; 4096];
        let mut wait = None;
        let result = loop {
            match link.read(&mut buffer) {
                Ok(0) => break link.write(self.teller.out()).map_err(|e| e.to_string()),
                Ok(read) => {
                    if let Err(error) = self.teller.received(&buffer[..read]) {
                        if let Error::Refused { seconds, .. } = error {
                            wait = Some(Duration::from_secs(u64::from(seconds)));
                        }
                        break Err(error.to_string());
                    }
                }
                Err(error) => break Err(format!("the service has gone ({error})")),
            }
        };
        let Some(dialler) = &mut self.dialler else { return };
        if !was_welcome && self.teller.is_welcome() {
            dialler.succeeded();
            dialler.say("the service listens".into());
        }
        if let Err(text) = result {
            dialler.say(text);
            dialler.wait(now, wait.unwrap_or(Duration::ZERO));
            self.link = None;
            self.teller.disconnected();
        }
    }

    /// Programs and their marks.
    fn serve(&mut self, now: Duration) {
        let Some(programs) = &mut self.programs else {
            self.teller.end_snapshot(true);
            return;
        };
        let is_new = programs.serve(&self.roots.proc);
        if is_new || now >= self.schedule.follow {
            programs.follow(&mut self.frames);
            self.schedule.follow = now + FOLLOW;
        }
        if self.teller.is_welcome() {
            let told = Mark::ALL.map(|mark| self.teller.mark(mark, programs.marked(mark)));
            let all = told.iter().all(|told| *told);
            if all {
                programs.told(self.teller.awaited());
            }
            self.teller.end_snapshot(all);
            programs.reply(|serial| self.teller.is_done(serial));
        } else {
            programs.reply_without_service();
        }
    }

    fn press(&mut self, now: Duration) {
        self.schedule.pressure = now + PRESSURE;
        let pressure = pressure::read(&self.roots);
        self.teller.pressure(pressure);
        if f64::from(pressure.some) / 100.0 > self.config.rest_above {
            self.schedule.step = self.schedule.step.max(self.schedule.pressure);
        }
    }

    /// Looks at some blocks and tells them; `true` at the end of a round.
    fn step(&mut self, now: Duration) -> io::Result<bool> {
        let all = self.mode.print || self.mode.once || self.teller.in_snapshot();
        let Some(blocks) = self.walk.next(all) else {
            return Ok(true);
        };
        if let Usage::Idle(idle) = &mut self.usage {
            blocks.clone().try_for_each(|block| idle.look(block, now))?;
        }
        let (flags, counts) = (&mut self.round.flags, &mut self.round.counts);
        let frames = (blocks.end - blocks.start) as usize * BLOCK;
        flags.resize(frames.max(STEP as usize * BLOCK), 0);
        counts.resize(frames.max(STEP as usize * BLOCK), 0);
        self.frames
            .read(blocks.start, &mut flags[..frames], &mut counts[..frames])?;
        let pieces = flags.chunks(BLOCK).zip(counts.chunks(BLOCK));
        for (block, (flags, counts)) in blocks.zip(pieces) {
            let mut said = classify(flags, counts);
            warm(&self.usage, block, &mut said);
            if self.mode.print {
                self.round.report.add(&said);
                continue;
            }
            match self.teller.tell(block, &said) {
                Told::Same => self.walk.looked(block, false),
                Told::Now => self.walk.looked(block, true),
                Told::Later => {
                    self.walk.put_back(block);
                    break;
                }
            }
        }
        self.teller.flush();
        Ok(false)
    }

    /// Returns whether that was all.
    fn end_round(&mut self, now: Duration) -> bool {
        if self.mode.print {
            print!("{}", self.round.report.text(pressure::read(&self.roots)));
        }
        self.round.report = Report::default();
        self.round.began = now;
        let activity = pressure::activity(&self.roots);
        // Where nothing came or went, frames are what they were; their use may be another.
        let is_still = activity == std::mem::replace(&mut self.round.activity, activity) && activity > 0;
        if is_still && matches!(self.usage, Usage::Nothing) && !self.teller.in_snapshot() {
            self.schedule.step = self.schedule.step.max(now + self.config.interval() * 4);
        }
        self.mode.once && !self.teller.in_snapshot()
    }

    /// Writes what is left, so that the service has heard it.
    fn drain(&mut self) -> io::Result<()> {
        self.serve(self.now());
        for _ in 0..1000 {
            self.exchange(self.now());
            if self.teller.pending() == 0 {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(io::Error::other("the service does not read"))
    }

    fn sleep(&self) {
        let now = self.now();
        let dial = self
            .dialler
            .as_ref()
            .filter(|_| self.link.is_none())
            .map(Dialler::next);
        let follow = self.programs.as_ref().filter(|programs| !programs.is_empty());
        let step = self.may_step().then_some(self.schedule.step);
        let pressure = self.teller.is_welcome().then_some(self.schedule.pressure);
        let times = [dial, follow.map(|_| self.schedule.follow), step, pressure];
        let next = times.into_iter().flatten().min().unwrap_or(now + LONGEST);
        let wait = next.saturating_sub(now).min(LONGEST);
        let mut fds = Vec::new();
        if let Some(link) = &self.link {
            let out = if self.teller.pending() == 0 {
                PollFlags::empty()
            } else {
                PollFlags::OUT
            };
            fds.push(PollFd::from_borrowed_fd(link.as_fd(), PollFlags::IN | out));
        }
        if let Some(programs) = &self.programs {
            fds.extend(
                programs
                    .wait_for()
                    .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
            );
        }
        let timeout = Timespec::try_from(wait).ok();
        // Interrupted or not, all is looked at again.
        let _ = poll(&mut fds, timeout.as_ref());
    }
}

fn usage(roots: &Roots, config: &Config, memory: &[Range<u32>], lacks: &mut Vec<Lack>) -> Usage {
    let end = memory.last().map_or(0, |last| last.end as usize);
    let wanted = config.temperature;
    if matches!(wanted, Use::Auto | Use::Idle) {
        match Idle::open(roots, end, config.use_interval()) {
            Ok(idle) => return Usage::Idle(idle),
            Err(lack) => lacks.push(lack),
        }
    }
    if matches!(wanted, Use::Auto | Use::Damon) {
        match Damon::start(roots, memory, config.use_interval()) {
            Ok(damon) => return Usage::Damon(damon),
            Err(lack) => lacks.push(lack),
        }
    }
    Usage::Nothing
}

fn warm(usage: &Usage, block: u32, frames: &mut block::Frames) {
    let temperature = |place: usize| match usage {
        Usage::Idle(idle) => idle.temperature(block, place),
        Usage::Damon(damon) => damon.temperature(block),
        Usage::Nothing => Temperature::Unknown,
    };
    for (place, said) in frames.iter_mut().enumerate() {
        // The kernel tells of pages of files and programs only.
        if said.kind() != Kind::Kernel {
            *said = said.with_temperature(temperature(place));
        }
    }
}

/// The kernel's boot_id; zeros if there is none.
fn boot(roots: &Roots) -> [u8; 16] {
    let text = std::fs::read_to_string(roots.proc.join("sys/kernel/random/boot_id")).unwrap_or_default();
    let digits: Vec<u8> = text
        .chars()
        .filter_map(|digit| digit.to_digit(16))
        .filter_map(|digit| u8::try_from(digit).ok())
        .collect();
    let mut boot = [0; 16];
    for (byte, pair) in boot.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    boot
}
