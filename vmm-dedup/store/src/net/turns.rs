//! Whose turn it is. The store has one thread. Each user has a turn after the other, however many processes he has; likewise the
//! processes of a user, and the connections of a process. A turn is short ([`Turn::is_over`]). So what somebody waits for is as many
//! turns as there are users who want something, and processes of his own user, and not as many as there are connections.
//!
//! Nobody waits when nobody else wants a turn.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, SemaphorePermit};
use vmm_dedup_protocol::peer::overflow_user;

/// Records of a turn.
const RECORDS: u32 = 8;

/// How long a turn is, at most: the record that is being handled is the last one then.
const TIME: Duration = Duration::from_micros(500);

/// Needless news that a process may cause: so many at once, and so many a second. They cost others lookups, and a ring of 65,536 of
/// them that is overrun has others look everything up again.
const NEWS_AT_ONCE: f64 = 8192.0;
const NEWS_PER_SECOND: f64 = 4096.0;

/// The same for a user, all of whose processes together may cause no more than so many of one.
const USER_IS_WORTH: f64 = 4.0;

/// A turn ends after so many.
const NEWS: u64 = 1024;

/// Longest pause that a process makes for that: its questions are answered in time.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Who takes turns at some place.
type Gates<T> = Mutex<HashMap<u64, Weak<T>>>;

/// An account of needless news: so many may be caused at once, and so many a second.
#[derive(Debug)]
struct Account {
    at_once: f64,
    per_second: f64,
    /// How many more may be caused, and as of when.
    left: Mutex<(f64, Instant)>,
}

impl Account {
    /// That of so many processes.
    fn new(processes: f64) -> Self {
        let at_once = processes * NEWS_AT_ONCE;
        Self {
            at_once,
            per_second: processes * NEWS_PER_SECOND,
            left: Mutex::new((at_once, Instant::now())),
        }
    }

    /// Needless news were caused. Returns how long the pause for them is.
    fn pay(&self, news: u64, now: Instant) -> Duration {
        let mut account = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let earned = now.saturating_duration_since(account.1).as_secs_f64() * self.per_second;
        #[allow(clippy::cast_precision_loss)] // of one message
        let left = (account.0 + earned).min(self.at_once) - news as f64;
        *account = (left, now);
        match left < 0.0 {
            true => LONGEST_PAUSE.min(Duration::from_secs_f64(-left / self.per_second)),
            false => Duration::ZERO,
        }
    }

    /// How long it takes until it is as that of who comes anew.
    fn debt(&self, now: Instant) -> Duration {
        let account = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let earned = now.saturating_duration_since(account.1).as_secs_f64() * self.per_second;
        Duration::from_secs_f64((self.at_once - account.0 - earned).max(0.0) / self.per_second)
    }
}

/// A process.
#[derive(Debug)]
struct Process {
    gate: Semaphore,
    news: Account,
}

impl Default for Process {
    fn default() -> Self {
        Self {
            gate: Semaphore::new(1),
            news: Account::new(1.0),
        }
    }
}

/// A user.
#[derive(Debug)]
struct User {
    gate: Semaphore,
    news: Account,
}

impl Default for User {
    fn default() -> Self {
        Self {
            gate: Semaphore::new(1),
            news: Account::new(USER_IS_WORTH),
        }
    }
}

/// All who are connected.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    processes: Gates<Process>,
    users: Gates<User>,
}

/// Whom a number names, who is made if he is not there.
fn named<T: Default>(gates: &Gates<T>, number: u64) -> Arc<T> {
    let mut gates = gates.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = gates.get(&number).and_then(Weak::upgrade) {
        return known;
    }
    let new = Arc::new(T::default());
    gates.insert(number, Arc::downgrade(&new));
    new
}

/// Forgets whom nobody knows any more.
fn forget<T>(gates: &Gates<T>, number: u64) {
    let mut gates = gates.lock().unwrap_or_else(PoisonError::into_inner);
    if gates.get(&number).is_some_and(|gate| gate.strong_count() <= 1) {
        gates.remove(&number);
    }
}

/// A connection's place among the others.
#[derive(Debug)]
pub(crate) struct Place {
    turns: Arc<Turns>,
    pid: u64,
    uid: u32,
    process: Arc<Process>,
    user: Arc<User>,
    /// Whether the user pays for news. Root and the store's own user do not: they may have many VMs, and may change them all.
    user_pays: bool,
}

impl Place {
    /// A connection of a process and user.
    pub(super) fn new(turns: &Arc<Turns>, pid: u64, uid: u32) -> Self {
        Self {
            user_pays: uid == overflow_user() || (uid != 0 && uid != rustix::process::geteuid().as_raw()),
            process: named(&turns.processes, pid),
            user: named(&turns.users, uid.into()),
            turns: turns.clone(),
            pid,
            uid,
        }
    }

    /// The connection has gone. Its process and its user are remembered until they have paid for their news, so that nothing is
    /// gained by connecting anew.
    pub(super) async fn settle(self) {
        let now = Instant::now();
        let debt = match self.user_pays {
            true => self.process.news.debt(now).max(self.user.news.debt(now)),
            false => self.process.news.debt(now),
        };
        if debt > Duration::ZERO {
            tokio::time::sleep(debt).await;
        }
    }

    /// Waits for a turn.
    pub(super) async fn turn(&self) -> Turn<'_> {
        // Nobody closes the gates.
        let process = self.process.gate.acquire().await.ok();
        let user = self.user.gate.acquire().await.ok();
        Turn {
            process: &self.process,
            user: self.user_pays.then_some(&self.user),
            of_process: process,
            of_user: user,
            started: Instant::now(),
            records: 0,
            news: 0,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        forget(&self.turns.processes, self.pid);
        forget(&self.turns.users, self.uid.into());
    }
}

/// A turn.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    process: &'a Process,
    /// Who pays for news, too.
    user: Option<&'a User>,
    of_process: Option<SemaphorePermit<'a>>,
    of_user: Option<SemaphorePermit<'a>>,
    started: Instant,
    records: u32,
    news: u64,
}

impl Turn<'_> {
    /// A record was handled, which caused so much needless news.
    pub(super) fn count(&mut self, news: u64) {
        self.records += 1;
        self.news += news;
    }

    /// Whether it is others' turn.
    pub(super) fn is_over(&self) -> bool {
        self.records >= RECORDS || self.news >= NEWS || self.started.elapsed() >= TIME
    }

    /// Lets others have theirs, and pauses if that is due: the connections of the process wait for it. Where its user has caused too
    /// many news with several processes, all of these wait.
    pub(super) async fn end(mut self) {
        tokio::task::yield_now().await;
        let (news, now) = (self.news, Instant::now());
        let payer = self.user.filter(|_| news > 0);
        let of_user = payer.map_or(Duration::ZERO, |user| user.news.pay(news, now));
        if of_user > Duration::ZERO {
            tokio::time::sleep(of_user).await;
        }
        self.of_user.take();
        let pause = self.process.news.pay(news, now).saturating_sub(of_user);
        if pause > Duration::ZERO {
            tokio::time::sleep(pause).await;
        }
        self.of_process.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needless_news_are_paid_for_with_time() {
        let (process, start) = (Account::new(1.0), Instant::now());
        assert_eq!(process.debt(start), Duration::ZERO);
        assert_eq!(process.pay(8192, start), Duration::ZERO);
        assert_eq!(process.debt(start), Duration::from_secs(2));
        assert_eq!(process.pay(2048, start), Duration::from_millis(500));
        let later = start + Duration::from_secs(60);
        assert_eq!(
            process.pay(8192, later),
            Duration::ZERO,
            "no more than that is kept"
        );
        assert_eq!(process.pay(1 << 20, later), LONGEST_PAUSE);
    }

    /// Eight processes of a user that cause as many news at once as one may: how long that takes, and how long another user waits for
    /// a turn meanwhile.
    fn eight_processes_of(uid: u32) -> (Duration, Duration) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let turns = Arc::new(Turns::default());
        runtime.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            for pid in 1..=8 {
                let turns = turns.clone();
                tasks.spawn(async move {
                    let place = Place::new(&turns, pid, uid);
                    let mut turn = place.turn().await;
                    turn.count(8192);
                    turn.end().await;
                });
            }
            let (other, start) = (Place::new(&turns, 9, 65_532), Instant::now());
            let mut longest = Duration::ZERO;
            while !tasks.is_empty() {
                let asked = Instant::now();
                other.turn().await.end().await;
                longest = longest.max(asked.elapsed());
                tokio::time::sleep(Duration::from_millis(2)).await;
                while tasks.try_join_next().is_some() {}
            }
            (start.elapsed(), longest)
        })
    }

    #[test]
    fn a_user_pays_for_the_news_of_all_its_processes_and_others_do_not() {
        let (took, longest) = eight_processes_of(65_531);
        // What is beyond four processes' is half: two seconds.
        assert!(took >= Duration::from_millis(1900), "{took:?}");
        assert!(
            longest < Duration::from_millis(900),
            "another user waited {longest:?}"
        );
        let (took, _) = eight_processes_of(0);
        assert!(took < Duration::from_millis(900), "{took:?}");
    }

    #[test]
    fn users_take_turns_and_so_do_the_processes_of_one() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let (turns, order) = (Arc::new(Turns::default()), Arc::new(Mutex::new(Vec::new())));
        runtime.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            // Eight connections of one process, three of another one of the same user, one of another user.
            let all = [(1, 1); 8].into_iter().chain([(2, 1); 3]).chain([(3, 2)]);
            for (pid, uid) in all {
                let (turns, order) = (turns.clone(), order.clone());
                tasks.spawn(async move {
                    let place = Place::new(&turns, pid, uid);
                    for _ in 0..100 {
                        let turn = place.turn().await;
                        order.lock().unwrap().push(pid);
                        turn.end().await;
                    }
                });
            }
            while tasks.join_next().await.is_some() {}
        });
        let order = order.lock().unwrap();
        let third = order.iter().rposition(|pid| *pid == 3).unwrap();
        let of = |pid| order[..third].iter().filter(|p| **p == pid).count();
        let (first, second) = (of(1), of(2));
        assert!(
            first + second <= 110,
            "{first} and {second} for 100 of the other user"
        );
        assert!(first.abs_diff(second) <= 10, "{first} and {second}");
        assert!(turns.processes.lock().unwrap().is_empty() && turns.users.lock().unwrap().is_empty());
    }
}
