//! Another process, which has a page of its own pinned.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use vmm_dedup_integration_tests::pinned::Pinned;

/// What this program is told to be that other one.
pub(crate) const ARGUMENT: &str = "other";

/// Its life: until nobody holds its standard input any more.
pub(crate) fn live() {
    let _pinned = Pinned::page();
    println!("pinned");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// It ends where this is dropped.
pub(crate) struct Other(Child);

impl Other {
    /// Its page is pinned when this returns.
    pub(crate) fn start() -> Self {
        let program = std::env::current_exe().expect("its path");
        let mut child = Command::new(program)
            .arg(ARGUMENT)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        let told = child.stdout.take().expect("it is piped");
        BufReader::new(told).read_line(&mut line).expect("it says so");
        assert_eq!(line, "pinned\n");
        Self(child)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
