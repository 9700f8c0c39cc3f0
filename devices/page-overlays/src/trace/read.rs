//! Reading traces.

use super::record::{
    Action, END, HEADER, MAGIC, MOST_FIELDS, Malformed, PREFIX, Record, VERSION, check_length,
};
use std::io::{self, Read};

/// Why a trace is refused.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It cannot be read.
    #[error("cannot read record {record} of the trace")]
    Read {
        /// The record, counted from 0.
        record: u64,
        /// Why.
        source: io::Error,
    },
    /// It does not begin as traces do.
    #[error("this is no trace: it does not begin with {:?}", String::from_utf8_lossy(&MAGIC))]
    NoTrace,
    /// It is of another version.
    #[error("the trace is of version {0}, this program reads version {VERSION}: record it anew")]
    Version(u16),
    /// It ends in a record, or before its end.
    #[error("the trace is cut off at byte {offset}, in record {record}: record it anew")]
    CutOff {
        /// The record, counted from 0.
        record: u64,
        /// How many bytes there are.
        offset: u64,
    },
    /// A record says what cannot be.
    #[error("record {record} of the trace at byte {offset}: {malformed}")]
    Malformed {
        /// The record, counted from 0.
        record: u64,
        /// Its first byte.
        offset: u64,
        /// What is wrong.
        malformed: Malformed,
    },
    /// The end says another number of records.
    #[error("the trace has {read} records, and its end says {said}")]
    Number {
        /// Records there are.
        read: u64,
        /// Records there should be.
        said: u64,
    },
    /// The bytes are not those that were written.
    #[error("the trace's checksum is {read:#010x}, and its end (record {record}) says {said:#010x}")]
    Checksum {
        /// The record of the end.
        record: u64,
        /// The checksum of what there is.
        read: u32,
        /// The checksum there should be.
        said: u32,
    },
    /// Something follows the end.
    #[error("the trace goes on after its end, record {0}")]
    GoesOn(u64),
}

/// Reads a trace, record by record. The last answer tells whether the trace was whole: who acts on records before that,
/// acts on what may be half a trace.
#[derive(Debug)]
pub struct TraceReader<R: Read> {
    from: R,
    record: u64,
    offset: u64,
    checksum: u32,
    done: bool,
}

impl<R: Read> TraceReader<R> {
    /// Begins to read. The reader should be buffered.
    ///
    /// # Errors
    /// [`TraceError`] if it is no trace, or of another version.
    pub fn new(from: R) -> Result<Self, TraceError> {
        let mut reader = Self {
            from,
            record: 0,
            offset: 0,
            checksum: 0,
            done: false,
        };
        let mut header = [0; HEADER];
        reader.fill(&mut header)?;
        reader.checksum = crc32c::crc32c(&header);
        if header[..8] != MAGIC {
            return Err(TraceError::NoTrace);
        }
        let version = u16::from_le_bytes([header[8], header[9]]);
        if version != VERSION || header[10..] != [0; 6] {
            return Err(TraceError::Version(version));
        }
        Ok(reader)
    }

    /// Reads so many bytes; a trace that ends before is cut off.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), TraceError> {
        let read = read_all(&mut self.from, bytes).map_err(|source| TraceError::Read {
            record: self.record,
            source,
        })?;
        self.offset += crate::sizes::number(read);
        if read < bytes.len() {
            return Err(TraceError::CutOff {
                record: self.record,
                offset: self.offset,
            });
        }
        Ok(())
    }

    fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        let (record, offset) = (self.record, self.offset);
        let wrong = |malformed| TraceError::Malformed {
            record,
            offset,
            malformed,
        };
        let mut prefix = [0; PREFIX];
        self.fill(&mut prefix)?;
        let [kind, core, low, high] = prefix;
        let length = usize::from(u16::from_le_bytes([low, high]));
        check_length(kind, length).map_err(wrong)?;
        let mut fields = [0; MOST_FIELDS];
        let fields = &mut fields[..length];
        self.fill(fields)?;
        if kind == END {
            self.check_end(fields)?;
            return Ok(None);
        }
        self.checksum = crc32c::crc32c_append(self.checksum, &prefix);
        self.checksum = crc32c::crc32c_append(self.checksum, fields);
        let action = Action::decode(kind, fields).map_err(wrong)?;
        self.record += 1;
        Ok(Some(Record { core, action }))
    }

    fn check_end(&mut self, fields: &[u8]) -> Result<(), TraceError> {
        let (records, checksum) = fields.split_first_chunk().expect("the length was checked");
        let (said, _) = checksum.split_first_chunk().expect("the length was checked");
        let (read, records) = (self.record, u64::from_le_bytes(*records));
        if records != read {
            return Err(TraceError::Number { read, said: records });
        }
        let said = u32::from_le_bytes(*said);
        if said != self.checksum {
            return Err(TraceError::Checksum {
                record: read,
                read: self.checksum,
                said,
            });
        }
        let more =
            read_all(&mut self.from, &mut [0]).map_err(|source| TraceError::Read { record: read, source })?;
        if more > 0 {
            Err(TraceError::GoesOn(read))
        } else {
            Ok(())
        }
    }
}

/// Reads until the bytes are full or there are no more; returns how many there were.
fn read_all(from: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < bytes.len() {
        match from.read(&mut bytes[read..]) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

impl<R: Read> Iterator for TraceReader<R> {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let next = self.next_record().transpose();
        self.done = !matches!(next, Some(Ok(_)));
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Pid;
    use crate::machine::{Contents, Promotion};
    use crate::pipeline::Issue;
    use crate::trace::{Bytes, TraceWriter};

    fn records() -> Vec<Record> {
        let pid = Pid::try_new(7).unwrap();
        let child = Pid::try_new(0x7fff).unwrap();
        let contents = Contents::WithMetadata;
        let (address, pages) = (0xffff_ffff_f000, 1);
        let mut actions = vec![
            Action::Compute(u32::MAX),
            Action::Map {
                pid,
                contents,
                address,
                pages,
            },
            Action::Fork { parent: pid, child },
            Action::Speculate(pid),
            Action::Exit(child),
        ];
        for how in [Promotion::CopyAndCommit, Promotion::Commit, Promotion::Discard] {
            actions.push(Action::Promote { pid, how, address });
        }
        for (metadata, issue) in [(false, Issue::Free), (true, Issue::AfterLoad)] {
            let bytes = Bytes::new(&[9; 64]).unwrap();
            actions.push(Action::Load {
                metadata,
                pid,
                bytes: 3,
                issue,
                address,
            });
            actions.push(Action::Store {
                metadata,
                pid,
                bytes,
                issue,
                address,
            });
        }
        (0..)
            .zip(actions)
            .map(|(core, action)| Record { core, action })
            .collect()
    }

    fn written() -> Vec<u8> {
        let mut writer = TraceWriter::new(Vec::new()).unwrap();
        for record in records() {
            writer.write(&record).unwrap();
        }
        writer.finish().unwrap()
    }

    fn read(bytes: &[u8]) -> Result<Vec<Record>, TraceError> {
        TraceReader::new(bytes)?.collect()
    }

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(read(&written()).unwrap(), records());
    }

    #[test]
    fn a_trace_that_is_cut_off_anywhere_is_refused_and_says_where() {
        let bytes = written();
        for length in 0..bytes.len() {
            let error = read(&bytes[..length]).unwrap_err();
            let TraceError::CutOff { offset, record } = error else {
                panic!("{length}: {error}");
            };
            assert_eq!(offset, length as u64);
            assert!(record <= 12);
        }
        let message = read(&bytes[..bytes.len() - 1]).unwrap_err().to_string();
        let expected = format!(
            "the trace is cut off at byte {}, in record 12: record it anew",
            bytes.len() - 1
        );
        assert_eq!(message, expected);
    }

    #[test]
    fn every_changed_byte_is_found() {
        let bytes = written();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            // The end has a core that nobody reads.
            let harmless = at == bytes.len() - 15;
            assert_eq!(read(&changed).is_ok(), harmless, "byte {at}");
        }
    }

    #[test]
    fn errors_name_the_record() {
        let mut bytes = written();
        bytes[16 + 8] = 77; // the kind of the second record
        let message = read(&bytes).unwrap_err().to_string();
        assert_eq!(message, "record 1 of the trace at byte 24: kind 77 is unknown");
        let mut bytes = written();
        bytes[16 + 2] = 5; // the length of the first
        let message = read(&bytes).unwrap_err().to_string();
        assert_eq!(
            message,
            "record 0 of the trace at byte 16: kind 1 has 5 bytes of fields, it should have 4"
        );
    }

    #[test]
    fn other_files_versions_and_what_goes_on_are_refused() {
        assert!(matches!(read(&[0; 100]), Err(TraceError::NoTrace)));
        let mut newer = written();
        newer[8] = 2;
        assert!(matches!(read(&newer), Err(TraceError::Version(2))));
        let mut more = written();
        more.push(0);
        assert!(matches!(read(&more), Err(TraceError::GoesOn(12))));
    }
}
