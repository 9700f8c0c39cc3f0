//! Codecs: how a page becomes fewer bytes, and a page again.

mod contract;
mod error;
mod kind;
mod lz4;
mod overlay;
mod set;
mod zstd;

pub use contract::Codec;
pub use error::{PackError, RebuildError};
pub use kind::{Kind, Kinds};
pub use lz4::Lz4;
pub use overlay::Overlay;
pub use set::Codecs;
pub use zstd::Zstd;
