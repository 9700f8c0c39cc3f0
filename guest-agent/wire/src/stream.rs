//! Messages out of a stream of bytes.

use crate::malformed::Malformed;
use crate::message::{HEADER, Header, MOST_PAYLOAD};

/// Holds the beginning of a message until the rest of it comes: at most one message.
#[derive(Debug, Default)]
pub struct Stream {
    held: Vec<u8>,
}

impl Stream {
    /// Takes bytes, in whatever pieces they come, and hands over each message that is complete.
    ///
    /// # Errors
    /// The first error: of a header, or of `each`. The stream is of no use then.
    pub fn take<E: From<Malformed>>(
        &mut self,
        mut bytes: &[u8],
        mut each: impl FnMut(Header, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        while !bytes.is_empty() {
            if self.held.is_empty() {
                // Most messages come whole.
                if let Some((header, payload, rest)) = split(bytes)? {
                    each(header, payload)?;
                    bytes = rest;
                    continue;
                }
            }
            bytes = self.hold(bytes)?;
            let held = std::mem::take(&mut self.held);
            match split(&held)? {
                Some((header, payload, _)) => each(header, payload)?,
                None => self.held = held,
            }
        }
        Ok(())
    }

    /// Takes what belongs to the message that has begun; returns the rest.
    fn hold<'a>(&mut self, mut bytes: &'a [u8]) -> Result<&'a [u8], Malformed> {
        for wanted in [Some(HEADER), None] {
            let wanted = match (wanted, self.held.first_chunk::<HEADER>()) {
                (Some(header), _) => header,
                (None, Some(header)) => HEADER + Header::parse(*header)?.len,
                (None, None) => break,
            };
            let take = wanted.saturating_sub(self.held.len()).min(bytes.len());
            let (mine, rest) = bytes.split_at(take);
            self.held.extend(mine);
            bytes = rest;
        }
        Ok(bytes)
    }

    /// Bytes that are held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }
}

const _: () = assert!(MOST_PAYLOAD <= u16::MAX as usize);

type Split<'a> = Option<(Header, &'a [u8], &'a [u8])>;

fn split(bytes: &[u8]) -> Result<Split<'_>, Malformed> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else {
        return Ok(None);
    };
    let header = Header::parse(*header)?;
    Ok(rest
        .split_at_checked(header.len)
        .map(|(payload, rest)| (header, payload, rest)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Message;
    use proptest::prelude::*;

    #[test]
    fn a_header_with_too_long_a_payload_is_refused_before_the_payload_comes() {
        let mut header = [0; HEADER];
        header[..2].copy_from_slice(&u16::MAX.to_le_bytes());
        for pieces in [HEADER, 3] {
            let mut stream = Stream::default();
            let result = header
                .chunks(pieces)
                .try_for_each(|piece| stream.take(piece, |_, _| Ok::<(), Malformed>(())));
            assert_eq!(result, Err(Malformed::Long(usize::from(u16::MAX))));
        }
    }

    proptest! {
        #[test]
        fn messages_come_out_whole_however_the_bytes_come(pieces in prop::collection::vec(1_usize..30, 1..60)) {
            let mut bytes = Vec::new();
            for number in 0..30 {
                match number % 3 {
                    0 => Message::Resync.encode(number, &mut bytes),
                    1 => Message::Done { serial: number }.encode(number, &mut bytes),
                    _ => Message::Welcome { version: 1, credit: 5 }.encode(number, &mut bytes),
                }
            }
            let (mut stream, mut rest, mut numbers) = (Stream::default(), &bytes[..], Vec::new());
            for piece in pieces.into_iter().cycle() {
                let (now, later) = rest.split_at(piece.min(rest.len()));
                rest = later;
                stream.take(now, |header, payload| {
                    assert_eq!(header.len, payload.len());
                    numbers.push(header.number);
                    Ok::<(), Malformed>(())
                }).unwrap();
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(numbers, (0..30).collect::<Vec<_>>());
            prop_assert_eq!(stream.held(), 0);
        }
    }
}
