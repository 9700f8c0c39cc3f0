//! What VMMs say of their VMs, whichever VMM it is.

/// What a living VMM says of its VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Running,
    Paused,
    /// The VMM lives, its VM does not.
    Off,
}
