//! Memory with content that is known, page by page.

mod area;
mod images;
mod kind;
mod numbers;

pub(crate) use area::{Area, HUGE_PAGES};
pub(crate) use images::total_mib;
pub(crate) use kind::{Kind, fill};
pub(crate) use numbers::{mix, pick};
