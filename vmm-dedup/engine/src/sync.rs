//! Locks of what the models of vmm-dedup/engine/loom walk through. A panic elsewhere poisons none of them: what they guard is
//! changed in one step.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, RwLock};
use std::sync::{PoisonError, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits, but no longer than until the deadline; whether it has come.
pub(crate) fn wait_until<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Instant,
) -> (MutexGuard<'a, T>, bool) {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return (guard, true);
    }
    let (guard, timeout) = condition
        .wait_timeout(guard, left)
        .unwrap_or_else(PoisonError::into_inner);
    (guard, timeout.timed_out())
}
