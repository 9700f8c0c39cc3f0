//! The paper's experiments, in kind: fork ([`fork`], section 5.1), sparse matrices ([`sparse`], section 5.2), and metadata
//! of words ([`metadata`], section 5.3.4, for which the paper has no figures).

pub mod fork;
pub mod metadata;
pub mod sparse;
