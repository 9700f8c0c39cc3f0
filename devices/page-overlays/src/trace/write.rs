//! Writing traces.

use super::record::{END, HEADER, MAGIC, MOST_FIELDS, PREFIX, Record, VERSION};
use std::io::{self, Write};

/// Writes a trace. Without [`TraceWriter::finish`] the trace has no end, and no reader takes it.
#[derive(Debug)]
pub struct TraceWriter<W: Write> {
    to: W,
    records: u64,
    checksum: u32,
    fields: Vec<u8>,
}

impl<W: Write> TraceWriter<W> {
    /// Begins a trace.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn new(to: W) -> io::Result<Self> {
        let mut writer = Self {
            to,
            records: 0,
            checksum: 0,
            fields: Vec::with_capacity(MOST_FIELDS),
        };
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&MAGIC);
        header[8..10].copy_from_slice(&VERSION.to_le_bytes());
        writer.put(&header)?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.checksum = crc32c::crc32c_append(self.checksum, bytes);
        self.to.write_all(bytes)
    }

    fn put_record(&mut self, kind: u8, core: u8, fields: &[u8]) -> io::Result<()> {
        let [low, high, ..] = fields.len().to_le_bytes();
        let prefix: [u8; PREFIX] = [kind, core, low, high];
        self.put(&prefix)?;
        self.put(fields)
    }

    /// Writes a record.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&mut self, record: &Record) -> io::Result<()> {
        let mut fields = std::mem::take(&mut self.fields);
        fields.clear();
        let kind = record.action.encode(&mut fields);
        let written = self.put_record(kind, record.core, &fields);
        self.fields = fields;
        self.records += 1;
        written
    }

    /// Writes the end, and gives the writer back.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn finish(mut self) -> io::Result<W> {
        let mut fields = Vec::from(self.records.to_le_bytes());
        fields.extend(self.checksum.to_le_bytes());
        self.put_record(END, 0, &fields)?;
        self.to.flush()?;
        Ok(self.to)
    }
}
