//! The stream prefetcher (table 2): it watches what misses the L2, and names lines for the L3.
//!
//! As in the paper's references 34 and 51: a miss that no stream expects starts one; the next two misses near it give it a
//! direction; from then on each miss inside the stream's window moves the window by `degree` lines, until it is `distance`
//! lines ahead. The least recently used stream makes room.

use crate::address::LineAddress;
use crate::config::PrefetchConfig;
use crate::sizes::{LINE_BYTES, number};

/// Lines around its first miss in which a new stream looks for the next ones.
const TRAINING_LINES: i64 = 16;

#[derive(Clone, Copy, Debug)]
enum State {
    /// One miss.
    Started,
    /// Two misses, the second `+1` or `-1` of the first.
    Trained(i64),
    /// The window goes from the stream's line to this many lines on, in this direction.
    Following { direction: i64, ahead: i64 },
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The line number where the stream is.
    at: i64,
    state: State,
    used: u64,
}

/// Streams of misses.
#[derive(Debug)]
pub(crate) struct Prefetcher {
    config: PrefetchConfig,
    streams: Vec<Stream>,
    clock: u64,
}

impl Prefetcher {
    pub(crate) fn new(config: PrefetchConfig) -> Self {
        Self {
            config,
            streams: Vec::with_capacity(config.streams),
            clock: 0,
        }
    }

    /// Tells of a miss of the L2, and adds the lines that should be fetched.
    pub(crate) fn miss(&mut self, address: LineAddress, fetch: &mut Vec<LineAddress>) {
        if self.config.streams == 0 {
            return;
        }
        self.clock += 1;
        let line = line_number(address);
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.expects(line)) {
            stream.used = self.clock;
            let (from, to, direction) = stream.advance(line, self.config);
            let step = |lines: i64| address.offset(lines * direction);
            fetch.extend((from..to).filter_map(step));
            return;
        }
        let new = Stream {
            at: line,
            state: State::Started,
            used: self.clock,
        };
        if self.streams.len() < self.config.streams {
            self.streams.push(new);
        } else if let Some(oldest) = self.streams.iter_mut().min_by_key(|stream| stream.used) {
            *oldest = new;
        }
    }
}

impl Stream {
    fn expects(&self, line: i64) -> bool {
        let distance = line.wrapping_sub(self.at);
        match self.state {
            State::Started | State::Trained(_) => distance.unsigned_abs() <= TRAINING_LINES.unsigned_abs(),
            State::Following { direction, ahead } => (0..=ahead).contains(&(distance * direction)),
        }
    }

    /// Moves on; returns the lines to fetch, as distances `from..to` from the stream's new line, and the direction.
    fn advance(&mut self, line: i64, config: PrefetchConfig) -> (i64, i64, i64) {
        let direction = (line - self.at).signum();
        match self.state {
            State::Started | State::Trained(_) if direction == 0 => (0, 0, 0),
            State::Started => {
                self.state = State::Trained(direction);
                self.at = line;
                (0, 0, 0)
            }
            State::Trained(before) if before != direction => {
                self.state = State::Trained(direction);
                self.at = line;
                (0, 0, 0)
            }
            State::Trained(_) => {
                self.at = line;
                self.state = State::Following {
                    direction,
                    ahead: config.degree,
                };
                (1, config.degree + 1, direction)
            }
            State::Following { direction, ahead } => {
                // The window has its whole length before its start moves.
                let passed = (line - self.at) * direction;
                let end = (ahead + config.degree).min(passed + config.distance);
                let from = ahead + 1 - passed;
                self.at = line;
                self.state = State::Following {
                    direction,
                    ahead: (end - passed).max(ahead - passed),
                };
                (from, end + 1 - passed, direction)
            }
        }
    }
}

fn line_number(address: LineAddress) -> i64 {
    // 58 bits are left.
    i64::try_from(address.get() / number(LINE_BYTES)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, OnWrite};

    fn fetched(lines: &[i64]) -> Vec<Vec<u64>> {
        let mut prefetcher = Prefetcher::new(Config::table_2(OnWrite::Copy).prefetch);
        let base = LineAddress::physical(1000, 0);
        let mut miss = |line: &i64| {
            let mut fetch = Vec::new();
            prefetcher.miss(base.offset(*line).unwrap(), &mut fetch);
            fetch
                .iter()
                .map(|address| (address.get() - base.get()) / 64)
                .collect()
        };
        lines.iter().map(&mut miss).collect()
    }

    #[test]
    fn a_stream_is_followed_from_its_third_miss() {
        let expected: [Vec<u64>; 5] = [
            vec![],
            vec![],
            vec![3, 4, 5, 6],
            vec![7, 8, 9, 10],
            vec![11, 12, 13, 14],
        ];
        assert_eq!(fetched(&[0, 1, 2, 3, 4]), expected);
    }

    #[test]
    fn it_never_gets_further_than_its_distance() {
        let lines: Vec<i64> = (0..40).collect();
        let fetched = fetched(&lines);
        for (line, fetch) in fetched.iter().enumerate() {
            assert!(
                fetch.iter().all(|ahead| *ahead <= line as u64 + 24),
                "{line}: {fetch:?}"
            );
        }
        let all: Vec<u64> = fetched.concat();
        assert_eq!(all, (3..=63).collect::<Vec<u64>>());
    }

    #[test]
    fn streams_go_down_as_well() {
        assert_eq!(fetched(&[60, 59, 58])[2], [57, 56, 55, 54]);
    }

    #[test]
    fn far_misses_are_no_stream() {
        assert!(fetched(&[0, 100, 200, 300]).concat().is_empty());
    }
}
