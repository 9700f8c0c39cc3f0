//! Keeps a key in memory that is never shared. Argument: the agent's socket, if it is not at its usual place.

use std::path::PathBuf;
use vmm_dedup_hints::{Error, Hints, Mark, SOCKET, Status};

fn main() -> Result<(), Error> {
    let socket = std::env::args_os().nth(1).map_or(SOCKET.into(), PathBuf::from);
    let hints = Hints::connect_to(&socket)?;
    // First the mark, then the secret. What is zero and untouched may not be in memory yet.
    let mut key = vec![1_u8; 16 * 4096];
    match hints.mark(Mark::Never, &key) {
        Ok(pages) => println!("{pages} pages are never shared"),
        Err(Error::Refused(Status::NoService)) => println!("kept for when a service listens"),
        Err(error) => return Err(error),
    }
    key.fill(b'k');
    // The mark ends with this process.
    let mut line = String::new();
    if std::io::stdin().read_line(&mut line).is_err() {
        println!("nothing to wait for");
    }
    Ok(())
}
