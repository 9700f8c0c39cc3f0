//! The client's interrupts: eventfds for vectors of MSI-X.

use crate::raiser::Raiser;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_INFO_NORESIZE, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_NUM_IRQS,
};
use vfio_user::IrqInfo;

/// Vectors of MSI-X, and what raises them.
#[derive(Debug)]
pub struct Interrupts {
    count: u16,
    events: Mutex<Vec<Option<File>>>,
    raiser: Raiser,
}

impl Interrupts {
    /// So many vectors, none of which is raised.
    ///
    /// # Errors
    /// The kernel refuses what raises them.
    pub fn new(count: u16) -> io::Result<Self> {
        Ok(Self {
            count,
            events: Mutex::default(),
            raiser: Raiser::new()?,
        })
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u16 {
        self.count
    }

    /// What the protocol tells of a device's interrupts: MSI-X only.
    #[must_use]
    pub fn info(&self) -> Vec<IrqInfo> {
        let irq = |index| {
            let ours = index == VFIO_PCI_MSIX_IRQ_INDEX;
            IrqInfo {
                index,
                flags: if ours {
                    VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_NORESIZE
                } else {
                    0
                },
                count: if ours { self.count.into() } else { 0 },
            }
        };
        (0..VFIO_PCI_NUM_IRQS).map(irq).collect()
    }

    fn events(&self) -> MutexGuard<'_, Vec<Option<File>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Raises a vector, if the client listens. Does not wait, whatever the client does with its eventfd.
    pub fn raise(&self, vector: usize) {
        if let Some(Some(file)) = self.events().get(vector)
            && let Err(e) = self.raiser.raise(file)
        {
            log::warn!("interrupt {vector} is lost: {e}");
        }
    }

    /// Nobody listens any more.
    pub fn clear(&self) {
        self.events().clear();
    }

    /// The protocol's SET_IRQS.
    ///
    /// # Errors
    /// What is asked for does not exist, or is not done with eventfds.
    pub fn set(&self, index: u32, flags: u32, start: u32, count: u32, fds: Vec<File>) -> io::Result<()> {
        let end = start.checked_add(count).filter(|end| *end <= self.count.into());
        let (Some(end), VFIO_PCI_MSIX_IRQ_INDEX) = (end, index) else {
            return Err(invalid("there is no such interrupt vector"));
        };
        let events = match flags {
            _ if flags == VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER => fds
                .into_iter()
                .map(|file| event(file).map(Some))
                .collect::<io::Result<Vec<_>>>()?,
            // No events: these vectors, or all, are switched off.
            _ if flags == VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER && fds.is_empty() => {
                Vec::new()
            }
            _ => return Err(invalid("interrupts can be given eventfds, or none")),
        };
        let mut vectors = self.events();
        if count == 0 {
            vectors.clear();
            return Ok(());
        }
        if !events.is_empty() && events.len() != count as usize {
            return Err(invalid("there must be an eventfd for each vector"));
        }
        vectors.resize_with(self.count.into(), || None);
        let mut events = events.into_iter();
        for vector in &mut vectors[start as usize..end as usize] {
            *vector = events.next().flatten();
        }
        Ok(())
    }
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// An eventfd.
fn event(file: File) -> io::Result<File> {
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if kind.as_os_str() != "anon_inode:[eventfd]" {
        return Err(invalid("interrupts are raised through eventfds"));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const GIVE: u32 = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;

    /// Longer than raising takes, also on a machine that does other things as well.
    const PATIENCE: Duration = Duration::from_secs(20);

    fn read(event: &impl std::os::fd::AsFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn a_client_that_makes_its_eventfd_block_holds_up_nobody() {
        let theirs = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let ours = File::from(theirs.try_clone().unwrap());
        let interrupts = Arc::new(Interrupts::new(1).unwrap());
        interrupts
            .set(VFIO_PCI_MSIX_IRQ_INDEX, GIVE, 0, 1, vec![ours])
            .unwrap();
        // Both have one open file, and so its flags.
        let flags = rustix::fs::fcntl_getfl(&theirs).unwrap();
        rustix::fs::fcntl_setfl(&theirs, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (raised, wait) = channel();
        let raising = interrupts.clone();
        std::thread::spawn(move || {
            raising.raise(0);
            raised.send(()).unwrap();
        });
        wait.recv_timeout(PATIENCE).expect("raising waits for the client");
        assert_eq!(read(&theirs), u64::MAX);
        interrupts.raise(0);
        interrupts.raise(0);
        interrupts.raise(1);
        assert_eq!(read(&theirs), 2);
    }

    #[test]
    fn only_eventfds_are_taken() {
        let interrupts = Interrupts::new(1).unwrap();
        let file = File::open("/dev/null").unwrap();
        assert!(
            interrupts
                .set(VFIO_PCI_MSIX_IRQ_INDEX, GIVE, 0, 1, vec![file])
                .is_err()
        );
    }
}
