//! Finding work queues.

use crate::way::{InProcess, Node, Reach, SetupError, Vfio, Wanted, WorkQueue};
use std::path::Path;
use vmm_dedup::compare::{Answer, Error};
use vmm_dedup_dsa_model::{Faults, Shape, Timing};

/// Opens the work queue of a device node, or the device of a folder below `/sys` through VFIO; without one, all user queues that are enabled and free, those of this NUMA node
/// if there are any.
///
/// # Errors
/// If there is none, with what is wrong with those that there are.
pub fn open(node: Option<&Path>) -> Answer<Vec<Box<dyn WorkQueue>>> {
    let failed = |text: String| Error::Device(text);
    if let Some(path) = node.filter(|path| path.starts_with("/sys")) {
        let opened = Vfio::open(path).map_err(|error| failed(error.to_string()))?;
        return Ok(vec![Box::new(opened)]);
    }
    if let Some(path) = node {
        let opened = Node::open(path).map_err(|error| failed(error.to_string()))?;
        return Ok(vec![Box::new(opened)]);
    }
    let nodes = Node::list().map_err(|error| {
        failed(format!(
            "no DSA work queue can be found ({error}): configure one of type user (accel-config)"
        ))
    })?;
    let (mut opened, mut refused) = (Vec::new(), Vec::new());
    for path in nodes {
        match Node::open(&path) {
            Ok(node) => opened.push(node),
            Err(error) => refused.push(error.to_string()),
        }
    }
    if opened.is_empty() {
        let why = if refused.is_empty() {
            "there is none".to_owned()
        } else {
            refused.join("; ")
        };
        return Err(failed(format!("no DSA work queue can be used: {why}")));
    }
    let here = this_node();
    let near = |queue: &Node| here.is_some() && queue.limits().node == here;
    if opened.iter().any(near) {
        opened.retain(near);
    }
    let boxed = |node: Node| Box::new(node) as Box<dyn WorkQueue>;
    Ok(opened.into_iter().map(boxed).collect())
}

/// A model in this process, of Sapphire Rapids with its published latency and bandwidth, which reads this process's memory.
///
/// # Errors
/// If it cannot be brought up.
pub fn model() -> Result<Vec<Box<dyn WorkQueue>>, SetupError> {
    let shape = Shape::sapphire_rapids();
    let queue = InProcess::new(
        shape,
        Timing::PUBLISHED,
        Faults::default(),
        Reach::Process,
        Wanted::default(),
    )?;
    Ok(vec![Box::new(queue)])
}

/// The NUMA node of the CPU that this thread runs on.
fn this_node() -> Option<u32> {
    let (mut cpu, mut node) = (0u32, 0u32);
    #[allow(unsafe_code)] // no library wraps it
    // SAFETY: getcpu writes two numbers, and takes no third argument any more.
    let got = unsafe {
        libc::syscall(
            libc::SYS_getcpu,
            &raw mut cpu,
            &raw mut node,
            std::ptr::null_mut::<libc::c_void>(),
        )
    };
    (got == 0).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_queues_says_what_to_do() {
        let error = open(Some(Path::new("/dev/dsa/wq99.9")))
            .err()
            .map(|error| error.to_string());
        assert!(error.is_some_and(|text| text.contains("wq99.9")));
    }

    #[test]
    fn this_thread_is_on_a_node() {
        assert!(this_node().is_some());
    }
}
