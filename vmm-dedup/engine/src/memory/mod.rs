//! What is known of guest memory: how it is laid out, and the state of each page and each 2 MiB. Pure: no system calls but
//! those that check a new range.

pub(crate) mod advice;
pub(crate) mod bitmap;
pub(crate) mod chunk_state;
pub(crate) mod hint;
pub(crate) mod key_filter;
pub(crate) mod layout;
mod mappings;
pub(crate) mod outbox;
pub(crate) mod page_map;
pub(crate) mod page_state;
pub(crate) mod page_table;
mod placed_pages;
pub(crate) mod ranges;
pub(crate) mod thp_state;
pub(crate) mod worth;
