//! The client's interrupts: eventfds for vectors of MSI-X.

use rustix::fs::OFlags;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
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
}

impl Interrupts {
    /// So many vectors, none of which is raised.
    #[must_use]
    pub fn new(count: u16) -> Self {
        Self {
            count,
            events: Mutex::default(),
        }
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

    /// Raises a vector, if the client listens.
    pub fn raise(&self, vector: usize) {
        if let Some(Some(file)) = self.events().get(vector) {
            // A full eventfd has been raised already.
            let _ = rustix::io::write(file, &1u64.to_ne_bytes());
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

/// An eventfd that can be written without ever waiting.
fn event(file: File) -> io::Result<File> {
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if kind.as_os_str() != "anon_inode:[eventfd]" {
        return Err(invalid("interrupts are raised through eventfds"));
    }
    let flags = rustix::fs::fcntl_getfl(file.as_fd())?;
    rustix::fs::fcntl_setfl(file.as_fd(), flags | OFlags::NONBLOCK)?;
    Ok(file)
}
