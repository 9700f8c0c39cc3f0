//! `top`: a live view of a host and its VMs.

mod columns;
mod history;
mod pressure;
mod sample;
mod view;

use crate::which_store::WhichStore;
use clap::Args;
use history::History;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, getpid, kill_process};
use sample::Sample;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::{Duration, Instant};
use view::View;
use vmm_dedup_host::view::{HostView, Selection};
use vmm_dedup_host::{Failure, termination};

/// Watch this host and its VMs in the terminal.
///
/// SAVED is net of all bookkeeping, each VM bearing its part of the store's; SHARED is what maps pages of the store or
/// the zero page. PASS is how long ago a VM's last pass ended. WAIT: writers a second that had to wait for the copy-on-write
/// reserve. BUDGET, PERIOD and STOP are the settings cpu_percent, pass_period_ms and stop_target_us. What has no room is left out,
/// these, SHARED and MERGE/S first.
///
/// A store that ends is named, and its VMs stay with their last figures.
///
/// Keys: arrows left and right choose the column to sort by, r reverses, arrows up and down scroll, / shows only VMs whose
/// names have what is typed, h shows the keys, q quits.
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    store: WhichStore,
    /// Seconds from one look to the next.
    #[arg(long, default_value_t = 2.0, value_parser = parse_interval)]
    interval: f64,
    /// Write plots of what was seen into this folder, as SVG files: at the end, and once a minute.
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

/// How long to wait for a key before looking for figures.
const WAIT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// How often the screen is drawn anew at least: ages grow.
const REDRAW: Duration = Duration::from_secs(1);

fn parse_interval(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.2..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected 0.2 to 3600".into()),
    }
}

/// Runs the command until the user quits.
pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    if !(std::io::stdout().is_terminal() && std::io::stdin().is_terminal()) {
        return Err(Failure::usage(
            "top needs a terminal: for scripts there is `vmm-dedup stat --json`",
        ));
    }
    let selection = args.store.selection();
    let mut history = args.plot.as_deref().map(History::into).transpose()?;
    let mut view = View::new(Sample::of(HostView::of(&selection)?));
    let mut terminal =
        ratatui::try_init().map_err(|e| Failure::new(format!("the terminal cannot be used: {e}")))?;
    let looks = look(selection, Duration::from_secs_f64(args.interval));
    let watched = termination::on_termination(restore, || {
        watch(&mut terminal, &looks, &mut view, history.as_mut())
    });
    // Also when the terminal has gone: what was seen was seen.
    watched.and(history.map_or(Ok(()), |history| history.write()))
}

/// Looks at the stores again and again, in a thread of its own: one that hangs takes seconds to be found out.
fn look(selection: Selection, interval: Duration) -> Receiver<Sample> {
    let (tell, told) = sync_channel(0);
    std::thread::spawn(move || {
        let mut next = Instant::now() + interval;
        loop {
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            next = Instant::now() + interval;
            // That no store is there any more shows which ones have gone.
            let sample = HostView::even_silent(&selection).map_or_else(|_| Sample::of_nothing(), Sample::of);
            if tell.send(sample).is_err() {
                return;
            }
        }
    });
    told
}

fn watch(
    terminal: &mut DefaultTerminal,
    looks: &Receiver<Sample>,
    view: &mut View,
    mut history: Option<&mut History>,
) -> Result<(), Failure> {
    let broken = |e: std::io::Error| Failure::new(format!("the terminal cannot be used: {e}"));
    let mut drawn = None;
    loop {
        let old = drawn.is_none_or(|at: Instant| at.elapsed() >= REDRAW);
        let looked = match looks.try_recv() {
            Ok(sample) => {
                view.update(sample);
                if let Some(history) = &mut history {
                    history.add(view.at(), view.host());
                    history.write_now_and_then();
                }
                true
            }
            Err(TryRecvError::Empty) => false,
            Err(TryRecvError::Disconnected) => {
                return Err(Failure::new("nobody looks at the stores any more"));
            }
        };
        if old || looked {
            terminal.draw(|frame| view.draw(frame)).map_err(broken)?;
            drawn = Some(Instant::now());
        }
        match keyboard(WAIT).map_err(broken)? {
            Keyboard::Nothing => continue,
            Keyboard::Gone => return Err(Failure::new("the terminal has gone")),
            Keyboard::Keys => drawn = None,
        }
        // All keys that were read: the terminal does not tell of them again.
        while event::poll(Duration::ZERO).map_err(broken)? {
            match event::read().map_err(broken)? {
                Event::Key(key) if key.kind == KeyEventKind::Release => {}
                Event::Key(key) if is_control(key, 'c') => return Ok(()),
                Event::Key(key) if is_control(key, 'z') => {
                    restore();
                    // It goes on here when it is in the foreground again.
                    kill_process(getpid(), Signal::TSTP).map_err(|e| broken(e.into()))?;
                    *terminal = ratatui::try_init().map_err(broken)?;
                }
                Event::Key(key) if is_quit(key) && !view.takes_text() => return Ok(()),
                Event::Key(key) => view.press(key.code),
                _ => {}
            }
        }
    }
}

/// What the keyboard has.
enum Keyboard {
    Nothing,
    Keys,
    /// The other end of the terminal is closed.
    Gone,
}

/// Waits for a key, not for long. Of a terminal that has gone crossterm would wait for keys for ever.
fn keyboard(limit: Timespec) -> std::io::Result<Keyboard> {
    let stdin = std::io::stdin();
    let mut keys = [PollFd::new(&stdin, PollFlags::IN)];
    let ready = match poll(&mut keys, Some(&limit)) {
        Ok(ready) => ready,
        // The size of the terminal has changed, or it was stopped.
        Err(Errno::INTR) => 0,
        Err(e) => return Err(e.into()),
    };
    let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    Ok(match keys[0].revents() {
        _ if ready == 0 => Keyboard::Nothing,
        events if events.intersects(gone) => Keyboard::Gone,
        _ => Keyboard::Keys,
    })
}

/// Puts the terminal back, if it is still there.
fn restore() {
    let _ = ratatui::try_restore();
}

fn is_control(key: KeyEvent, letter: char) -> bool {
    key.code == KeyCode::Char(letter) && key.modifiers.contains(KeyModifiers::CONTROL)
}

fn is_quit(key: KeyEvent) -> bool {
    matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}
