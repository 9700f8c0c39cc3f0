//! The command as operators meet it: in pipes, on terminals of all widths, beside stores that hang or have gone.

mod alerts;
mod clock;
mod day;
mod doctor;
mod drawn;
mod errors;
mod host;
mod many;
mod network;
mod output;
mod packages;
mod peer;
mod plots;
mod screen;
mod several;
mod silent;
mod terminal;
mod top;
mod usage;
mod widths;
