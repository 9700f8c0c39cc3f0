//! One report per line, in one piece: a line is formatted here and handed to COM1 at once.

use core::fmt::{Arguments, Result, Write};

use crate::machine;

const LINE: usize = 1024;

struct Line {
    bytes: [u8; LINE],
    used: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> Result {
        // The last byte is kept for the newline; what does not fit is cut.
        let room = LINE - 1 - self.used;
        let take = text.len().min(room);
        self.bytes[self.used..self.used + take].copy_from_slice(&text.as_bytes()[..take]);
        self.used += take;
        Ok(())
    }
}

/// Writes one line.
pub fn print(text: Arguments<'_>) {
    let mut line = Line {
        bytes: [0; LINE],
        used: 0,
    };
    let _ = line.write_fmt(text);
    line.bytes[line.used] = b'\n';
    machine::write_serial(&line.bytes[..=line.used]);
}

/// Reports an event to the host.
#[macro_export]
macro_rules! say {
    ($($part:tt)*) => { $crate::console::print(format_args!("@payload {}", format_args!($($part)*))) };
}
