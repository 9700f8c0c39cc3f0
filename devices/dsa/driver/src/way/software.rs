//! Software errors (SWERR): what a device says when no completion record can, and what is done about it.

use vmm_dedup_dsa_abi::Status;
use vmm_dedup_dsa_abi::registers::SoftwareError;

/// What is done about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// What is in flight is aborted, and submitted again.
    Again,
    /// The device is reset and configured anew first.
    Reset,
    /// Nothing helps here: the queue is left alone, and others or the CPU do the work.
    GiveUp,
}

/// What the error of this number is, in words, and what is done about it.
#[must_use]
pub fn software_error(number: u8) -> (&'static str, Remedy) {
    use Remedy::{Again, GiveUp, Reset};
    match number {
        SoftwareError::QUEUE_DISABLED => ("the work queue is not enabled", Reset),
        SoftwareError::QUEUE_FULL => (
            "the work queue was full, and a descriptor is lost: somebody else submits to it",
            Again,
        ),
        SoftwareError::PORTAL => (
            "the portal takes no such write: configure the queue as dedicated",
            GiveUp,
        ),
        _ => Status::from_code(number).map_or(("an error that this driver does not know", Reset), of_status),
    }
}

/// That of a descriptor which has no record to tell of it.
fn of_status(status: Status) -> (&'static str, Remedy) {
    use Remedy::{Again, GiveUp, Reset};
    match status {
        Status::RecordFault => ("a completion record's page is missing", Again),
        Status::PageFault | Status::PageResponse | Status::Translation => {
            ("an operand's page is missing", Again)
        }
        Status::BatchListFault => ("the page of a batch's list is missing", Again),
        Status::BatchFailed => ("a member of a batch failed", Again),
        Status::ReadbackFault => ("the page to read back is missing", Again),
        Status::Hardware | Status::ReadbackHardware => ("the device failed", Reset),
        Status::Privilege => (
            "a descriptor claims a privilege that its queue does not have: configure the queue anew",
            GiveUp,
        ),
        Status::Opcode => (
            "the queue does not do the operation: allow it (op_config)",
            GiveUp,
        ),
        Status::Size | Status::Count => (
            "an operation is larger than the queue takes: raise its limits (max_transfer_size, max_batch_size)",
            GiveUp,
        ),
        // These are mistakes of the driver's, or descriptors that came to the device as others than they were.
        Status::RecordAlignment
        | Status::AddressAlignment
        | Status::ListAlignment
        | Status::Flags
        | Status::Reserved
        | Status::DeltaSize
        | Status::DeltaOrder
        | Status::DeltaRange
        | Status::Overlap
        | Status::Dualcast
        | Status::InterruptHandle
        | Status::TrafficClass
        | Status::IntegrityField => ("a descriptor came to the device that makes no sense", Reset),
        Status::Success | Status::FalsePredicate => ("an error that is none", Reset),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_says_what_it_is_and_unknown_ones_that_they_are_unknown() {
        let own = [
            SoftwareError::QUEUE_DISABLED,
            SoftwareError::QUEUE_FULL,
            SoftwareError::PORTAL,
        ];
        let known = own.into_iter().chain(Status::ALL.map(|status| status as u8));
        for number in known {
            let (text, _) = software_error(number);
            assert!(!text.contains("does not know"), "{number:#x}");
        }
        let (text, remedy) = software_error(0x3f);
        assert!(
            text.contains("does not know") && remedy == Remedy::Reset,
            "{text}"
        );
    }

    #[test]
    fn what_a_device_lost_is_submitted_again_and_what_it_never_does_is_not() {
        for (number, remedy) in [
            (SoftwareError::QUEUE_FULL, Remedy::Again),
            (Status::RecordFault as u8, Remedy::Again),
            (SoftwareError::QUEUE_DISABLED, Remedy::Reset),
            (Status::Hardware as u8, Remedy::Reset),
            (SoftwareError::PORTAL, Remedy::GiveUp),
            (Status::Opcode as u8, Remedy::GiveUp),
        ] {
            assert_eq!(software_error(number).1, remedy, "{number:#x}");
        }
    }
}
