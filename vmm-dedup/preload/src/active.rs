//! Whether the hooks do anything in this process: a word in memory that the kernel zeroes in every forked child,
//! whichever system call forked it.
#![allow(unsafe_code)] // mmap, and a constructor

use crate::settings::Settings;
use crate::{manager, real};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

static WORD: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
static WANTED: AtomicBool = AtomicBool::new(false);
static SETTINGS: OnceLock<Settings> = OnceLock::new();
static START: Once = Once::new();

/// Runs when the library is loaded, before the VMM's main().
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = load;

extern "C" fn load() {
    let loaded = std::panic::catch_unwind(|| {
        real::resolve();
        if let Some(settings) = Settings::from_environment()
            && SETTINGS.set(settings).is_ok()
        {
            WANTED.store(true, Ordering::Release);
        }
    });
    drop(loaded);
}

/// Whether the environment asks for dedup.
pub(crate) fn wanted() -> bool {
    WANTED.load(Ordering::Acquire)
}

/// Whether mappings are to be remembered: the supervisor may be started later, or runs in this very process.
pub(crate) fn watching() -> bool {
    wanted() && (WORD.load(Ordering::Acquire).is_null() || active())
}

/// Whether the supervisor runs in this very process.
pub(crate) fn active() -> bool {
    let word = WORD.load(Ordering::Acquire);
    // SAFETY: null, or the word that was mapped below and is never unmapped.
    !word.is_null() && unsafe { &*word }.load(Ordering::Acquire) != 0
}

/// The process talks to KVM: starts the supervisor, once.
pub(crate) fn start() {
    START.call_once(|| {
        if let (Some(settings), Some(word)) = (SETTINGS.get(), map_word()) {
            word.store(1, Ordering::Release);
            WORD.store(std::ptr::from_ref(word).cast_mut(), Ordering::Release);
            if !manager::spawn(settings) {
                word.store(0, Ordering::Release);
            }
        }
    });
}

fn map_word() -> Option<&'static AtomicU32> {
    const LEN: usize = 4096;
    let (prot, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping, never unmapped.
    let at = unsafe { real::mmap(std::ptr::null_mut(), LEN, prot, flags, -1, 0) };
    // SAFETY: our own mapping, if it is one.
    if at == libc::MAP_FAILED || unsafe { real::madvise(at, LEN, libc::MADV_WIPEONFORK) } != 0 {
        return None;
    }
    // SAFETY: zeroed, aligned, mapped for ever; zero is a valid AtomicU32.
    Some(unsafe { &*at.cast::<AtomicU32>() })
}
