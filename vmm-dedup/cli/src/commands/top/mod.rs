//! `top`: a live view of a host and its VMs.

mod columns;
mod help;
mod history;
mod pressure;
mod sample;
mod view;

use crate::which_store::WhichStore;
use clap::Args;
use history::History;
use ratatui::DefaultTerminal;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, getpid, kill_process};
use sample::Sample;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use view::View;
use vmm_dedup_host::silence::Silence;
use vmm_dedup_host::view::{HostView, Selection, StoreView};
use vmm_dedup_host::{Failure, note, termination};

/// Watch this host and its VMs in the terminal.
///
/// SAVED is net of all bookkeeping, each VM bearing its part of the store's; SHARED is what maps pages of the store or
/// the zero page. PASS is how long ago a VM's last pass ended. WAIT: writers a second that had to wait for the copy-on-write
/// reserve. BUDGET, PERIOD, STOP and RESERVE are the settings cpu_percent, pass_period_ms, stop_target_us and reserve_pages. What has no room is left out,
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

/// How long to wait for more keys of those that are there: asked for no time at all, crossterm does not look.
const SOON: Duration = Duration::from_millis(1);

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
        return Err(Failure::usage(format!(
            "top needs a terminal: for scripts there is `vmm-dedup stat --json{}`",
            args.store.words()
        )));
    }
    let selection = args.store.selection();
    let history = args.plot.as_deref().map(History::into).transpose()?;
    let host = HostView::even_silent(&selection)?;
    if !host.stores.iter().any(may_be_watched) {
        host.complete()?;
    }
    let mut view = View::new(Sample::of(host));
    let mut terminal =
        ratatui::try_init().map_err(|e| Failure::new(format!("the terminal cannot be used: {e}")))?;
    let looks = look(selection, Duration::from_secs_f64(args.interval));
    let history = Arc::new(Mutex::new(history));
    let ended_by_signal = {
        let history = history.clone();
        move || {
            let written = write_last(&history);
            // Nothing is drawn any more on what is restored.
            std::mem::forget(lock(&history));
            restore();
            if let Err(failure) = written {
                note!("vmm-dedup: {failure}");
            }
        }
    };
    let done = termination::on_termination(ended_by_signal, || {
        let watched = watch(&mut terminal, &looks, &mut view, &history);
        // Also when the terminal has gone: what was seen was seen.
        let written = write_last(&history);
        watched.and(written)
    });
    // Dropped, it would complain on standard error that it cannot be restored: of a terminal that has gone, a panic.
    if terminal.show_cursor().is_err() {
        std::mem::forget(terminal);
    }
    done
}

/// Whether there is something to look at, now or later: a store that never was one, or that this user may not ask, will not answer.
fn may_be_watched(store: &StoreView) -> bool {
    match &store.account {
        Ok(_) => true,
        Err((silence, _)) => store.record.is_some() && matches!(silence, Silence::Gone | Silence::Hangs),
    }
}

/// Writes the plots for the last time. Whoever comes second waits, and does nothing.
fn write_last(history: &Mutex<Option<History>>) -> Result<(), Failure> {
    let mut history = lock(history);
    let written = history.as_ref().map_or(Ok(()), History::write);
    *history = None;
    written
}

fn lock(history: &Mutex<Option<History>>) -> MutexGuard<'_, Option<History>> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
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
    history: &Mutex<Option<History>>,
) -> Result<(), Failure> {
    let broken = |e: std::io::Error| Failure::new(format!("the terminal cannot be used: {e}"));
    let mut drawn = None;
    loop {
        let old = drawn.is_none_or(|at: Instant| at.elapsed() >= REDRAW);
        let looked = match looks.try_recv() {
            Ok(sample) => {
                view.update(sample);
                if let Some(history) = &mut *lock(history) {
                    if view.host().answering > 0 {
                        history.add(view.at(), view.host());
                    }
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
            let drawing = lock(history);
            terminal.draw(|frame| view.draw(frame)).map_err(broken)?;
            drop(drawing);
            drawn = Some(Instant::now());
        }
        match keyboard(WAIT).map_err(broken)? {
            Keyboard::Nothing => continue,
            Keyboard::Gone => return Err(Failure::new("the terminal has gone")),
            Keyboard::Keys => drawn = None,
        }
        // All keys that were read: the terminal does not tell of them again.
        while event::poll(SOON).map_err(broken)? {
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

/// Puts the terminal back, if it is still there, with its cursor.
fn restore() {
    let _ = ratatui::try_restore();
    let _ = execute!(std::io::stdout(), Show);
}

fn is_control(key: KeyEvent, letter: char) -> bool {
    key.code == KeyCode::Char(letter) && key.modifiers.contains(KeyModifiers::CONTROL)
}

fn is_quit(key: KeyEvent) -> bool {
    matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}
