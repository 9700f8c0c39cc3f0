//! Who is a twin of whom: keys, the store's index, tree search, sightings and publications.

pub(crate) mod candidates;
pub(crate) mod collisions;
pub(crate) mod copies;
pub(crate) mod find;
pub(crate) mod gaps;
pub(crate) mod keys;
pub(crate) mod publish;
pub(crate) mod request;
pub(crate) mod series;
pub(crate) mod tree_search;
