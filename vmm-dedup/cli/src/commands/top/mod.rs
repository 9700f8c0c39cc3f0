//! `top`: a live view of a host and its VMs.

mod pressure;
mod sample;
mod view;

use crate::store_socket::StoreSocket;
use clap::Args;
use pressure::Pressure;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use sample::Sample;
use std::io::IsTerminal;
use std::time::{Duration, Instant};
use view::View;
use vmm_dedup_host::{Failure, termination};
use vmm_dedup_protocol::observer::Observer;

/// Watch a host and its VMs in the terminal.
///
/// SAVED is net of all bookkeeping, each VM bearing its part of the store's; SHARED is what maps pages of the store or
/// the zero page. WAIT: writers a second that had to wait for the copy-on-write reserve.
///
/// Keys: arrows left and right choose the column to sort by, r reverses, arrows up and down scroll, q quits.
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    store: StoreSocket,
    /// Seconds from one look to the next.
    #[arg(long, default_value_t = 2.0, value_parser = parse_interval)]
    interval: f64,
}

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
    let mut observer = Observer::connect(&args.store.path).map_err(Failure::from_error)?;
    let mut view = View::new(args.store.path.display().to_string(), sample(&mut observer)?);
    let mut terminal =
        ratatui::try_init().map_err(|e| Failure::new(format!("the terminal cannot be used: {e}")))?;
    let interval = Duration::from_secs_f64(args.interval);
    termination::on_termination(ratatui::restore, || {
        watch(&mut terminal, &mut observer, &mut view, interval)
    })
}

fn sample(observer: &mut Observer) -> Result<Sample, Failure> {
    let (store, vms) = observer.stats().map_err(Failure::from_error)?;
    Ok(Sample {
        at: Instant::now(),
        store,
        vms,
        pressure: Pressure::of_host(),
    })
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    observer: &mut Observer,
    view: &mut View,
    interval: Duration,
) -> Result<(), Failure> {
    let broken = |e: std::io::Error| Failure::new(format!("the terminal cannot be used: {e}"));
    let mut next = Instant::now() + interval;
    loop {
        terminal.draw(|frame| view.draw(frame)).map_err(broken)?;
        if event::poll(next.saturating_duration_since(Instant::now())).map_err(broken)? {
            match event::read().map_err(broken)? {
                Event::Key(key) if key.kind == KeyEventKind::Release => {}
                Event::Key(key) if is_quit(key) => return Ok(()),
                Event::Key(key) => view.press(key.code),
                _ => {}
            }
        }
        if Instant::now() >= next {
            view.update(sample(observer)?);
            next = Instant::now() + interval;
        }
    }
}

fn is_quit(key: KeyEvent) -> bool {
    let control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}
