//! The command as operators meet it: in pipes, on terminals of all widths, beside stores that hang or have gone.

mod doctor;
mod errors;
mod host;
mod output;
mod packages;
mod plots;
mod screen;
mod several;
mod terminal;
mod top;
mod widths;
