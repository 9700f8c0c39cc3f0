//! Machines driven by traces.

use crate::machine::{Machine, MachineError};
use crate::sizes::LINE_BYTES;
use crate::trace::{Action, Record, TraceError};

/// Why a trace was not played to its end.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace is refused.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The machine cannot do what a record says.
    #[error("record {record} of the trace ({action:?}) cannot be done: {source}")]
    Machine {
        /// The record, counted from 0.
        record: u64,
        /// What it says.
        action: Action,
        /// Why not.
        source: MachineError,
    },
}

/// Lets a machine do what one record says. What loads load is dropped.
///
/// # Errors
/// The machine's.
pub fn apply(machine: &mut Machine, record: &Record) -> Result<(), MachineError> {
    let core = usize::from(record.core);
    match record.action {
        Action::Compute(instructions) => machine.compute(core, u64::from(instructions)),
        Action::Map {
            pid,
            contents,
            address,
            pages,
        } => machine.map(pid, address, pages, contents),
        Action::Load {
            metadata,
            pid,
            bytes,
            issue,
            address,
        } => {
            let mut line = [0; LINE_BYTES];
            let bytes = &mut line[..usize::from(bytes)];
            if metadata {
                machine.read_metadata(core, pid, address, bytes, issue)
            } else {
                machine.read(core, pid, address, bytes, issue)
            }
        }
        Action::Store {
            metadata,
            pid,
            bytes,
            issue,
            address,
        } => {
            if metadata {
                machine.write_metadata(core, pid, address, bytes.get(), issue)
            } else {
                machine.write(core, pid, address, bytes.get(), issue)
            }
        }
        Action::Fork { parent, child } => machine.fork(core, parent, child),
        Action::Exit(pid) => {
            machine.exit(pid);
            Ok(())
        }
        Action::Promote { pid, how, address } => machine.promote(core, pid, address, how),
        Action::Speculate(pid) => machine.speculate(core, pid),
    }
}

/// Plays a trace; returns the number of records. `before` sees each record before the machine does it.
///
/// # Errors
/// [`ReplayError`] names the record. The machine has done what came before it, and its figures are those of half a trace.
pub fn replay(
    machine: &mut Machine,
    trace: impl Iterator<Item = Result<Record, TraceError>>,
    mut before: impl FnMut(&mut Machine, &Record) -> Result<(), MachineError>,
) -> Result<u64, ReplayError> {
    let mut records = 0;
    for record in trace {
        let record = record?;
        let done = before(machine, &record).and_then(|()| apply(machine, &record));
        done.map_err(|source| ReplayError::Machine {
            record: records,
            action: record.action,
            source,
        })?;
        records += 1;
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Pid;
    use crate::config::{Config, OnWrite};

    #[test]
    fn what_cannot_be_done_names_the_record() {
        let mut machine = Machine::try_new(Config::table_2(OnWrite::Overlay)).unwrap();
        let pid = Pid::try_new(1).unwrap();
        let actions = [
            Action::Compute(5),
            Action::Promote {
                pid,
                how: crate::machine::Promotion::Discard,
                address: 4096,
            },
        ];
        let trace = actions.map(|action| Ok(Record { core: 0, action }));
        let error = replay(&mut machine, trace.into_iter(), |_, _| Ok(())).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("record 1 of the trace (Promote"), "{text}");
        assert!(
            text.ends_with("process 1 has no page at 0x1000: map it first"),
            "{text}"
        );
        assert_eq!(machine.account(0).unwrap().core.instructions, 5);
    }
}
