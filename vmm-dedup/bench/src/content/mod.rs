//! Memory with content that is known, page by page.

mod area;
mod images;
mod kind;
mod numbers;
mod page_size;

pub(crate) use area::{Area, HUGE_PAGES, words};
pub(crate) use images::total_mib;
pub(crate) use kind::{Kind, fill};
pub(crate) use numbers::{mix, pick};
pub(crate) use page_size::{page_sizes, pages_name};
