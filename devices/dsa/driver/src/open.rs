//! Finding work queues.

use crate::way::{InProcess, Node, QueueLimits, Reach, SetupError, Vfio, Wanted, WorkQueue, with_causes};
use std::path::Path;
use vmm_dedup::compare::{Answer, Error};
use vmm_dedup_dsa_model::{Faults, Shape, Timing};

/// Opens the work queue of a device node, or the device of a folder below `/sys` through VFIO; without one, all user queues
/// that are enabled, free and of use, those of this NUMA node if there are any.
///
/// # Errors
/// If there is none, with what is wrong with those that there are.
pub fn open(node: Option<&Path>) -> Answer<Vec<Box<dyn WorkQueue>>> {
    let failed = |text: String| Error::Device(text);
    if let Some(path) = node.filter(|path| path.starts_with("/sys")) {
        let opened = Vfio::open(path).map_err(|error| failed(with_causes(&error)))?;
        return Ok(vec![Box::new(opened)]);
    }
    if let Some(path) = node {
        let opened = Node::open(path).map_err(|error| failed(with_causes(&error)))?;
        return Ok(vec![Box::new(opened)]);
    }
    let nodes = Node::list().map_err(|error| {
        failed(format!(
            "no DSA work queue can be found ({error}): configure one of type user (accel-config)"
        ))
    })?;
    let tried = nodes.iter().map(|path| {
        let opened = Node::open(path).map_err(|error| with_causes(&error));
        opened.and_then(|node| if_fit(node, path, |node| node.limits()))
    });
    let (mut opened, mut refused) = (Vec::new(), Vec::new());
    for tried in tried {
        match tried {
            Ok(node) => opened.push(node),
            Err(why) => refused.push(why),
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
    keep_near(&mut opened, this_node(), |queue| queue.limits().node);
    let boxed = |node: Node| Box::new(node) as Box<dyn WorkQueue>;
    Ok(opened.into_iter().map(boxed).collect())
}

/// A queue, or why this driver cannot use it.
fn if_fit<Q>(queue: Q, path: &Path, limits: impl Fn(&Q) -> QueueLimits) -> Result<Q, String> {
    match limits(&queue).unfit() {
        None => Ok(queue),
        Some(why) => Err(format!("{}: {why}", path.display())),
    }
}

/// Leaves out what is on other NUMA nodes, if anything is on this one.
fn keep_near<Q>(queues: &mut Vec<Q>, here: Option<u32>, node: impl Fn(&Q) -> Option<u32>) {
    let near = |queue: &Q| here.is_some() && node(queue) == here;
    if queues.iter().any(near) {
        queues.retain(near);
    }
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
        let error = error.expect("there is no such queue");
        assert!(
            error.contains("wq99.9") && error.contains("No such file or directory"),
            "{error}"
        );
    }

    #[test]
    fn a_queue_that_cannot_be_used_says_what_to_configure() {
        let good = QueueLimits {
            entries: 16,
            members: 1024,
            bytes: 1 << 31,
            operations: [u64::MAX; 4],
            node: None,
        };
        let path = Path::new("/dev/dsa/wq0.0");
        assert_eq!(if_fit(good, path, |queue| *queue), Ok(good));
        for (wrong, text) in [
            (QueueLimits { entries: 0, ..good }, "wq-size"),
            (QueueLimits { bytes: 2048, ..good }, "max-transfer-size"),
            (
                QueueLimits {
                    operations: [0; 4],
                    ..good
                },
                "does no Compare: allow it (op_config)",
            ),
        ] {
            let error = if_fit(wrong, path, |queue| *queue).unwrap_err();
            assert!(
                error.starts_with("/dev/dsa/wq0.0: ") && error.contains(text),
                "{error}"
            );
        }
    }

    #[test]
    fn queues_of_this_node_are_taken_and_others_if_there_are_none() {
        // Each by its node, which the kernel does not tell of the last one.
        let all = [Some(0), Some(1), Some(1), None];
        let kept = |here| {
            let mut queues = all.to_vec();
            keep_near(&mut queues, here, |node| *node);
            queues
        };
        assert_eq!(kept(Some(1)), [Some(1), Some(1)]);
        assert_eq!(kept(Some(0)), [Some(0)]);
        assert_eq!(kept(Some(7)), all);
        assert_eq!(kept(None), all);
    }

    #[test]
    fn this_thread_is_on_a_node() {
        assert!(this_node().is_some());
    }
}
