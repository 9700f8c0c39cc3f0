//! The supervisor's thread: takes letters, and has done what the [`Lifecycle`] says.
//!
//! What it is done with are its [`Hands`]: those of the engine (`engine.rs`), or of the models in `engine/loom`, which walk through
//! this loop.

use crate::error::Error;
use crate::memory::ranges::complement;
use crate::refusal;
use crate::supervisor::letter::{Answer, Letter};
use crate::supervisor::lifecycle::{Effect, Event, Lifecycle, Outcome, Span};
use crate::supervisor::mailbox::{Mailbox, Ticket};
use crate::supervisor::theirs::Keep;
use crate::supervisor::watched::Watched;
use std::ops::Range;
use std::time::Instant;

/// What carries out what the driver is to have done. All of it runs in the supervisor's thread.
pub(crate) trait Hands: Sized {
    /// What they alone understand of what the VMM sends.
    type Ask;
    /// What is told of a service that has ended.
    type Account;

    fn now(&self) -> Instant;

    /// Does what a letter asks for that only these hands understand.
    ///
    /// # Errors
    /// Whoever asked is told.
    fn take(driver: &mut Driver<Self>, ask: Self::Ask) -> Result<(), Error>;

    /// Carries an effect out.
    ///
    /// # Errors
    /// They become its outcome.
    fn carry_out(driver: &mut Driver<Self>, effect: &Effect) -> Result<(), Error>;

    /// Several effects come, one behind the other (`true`), or none is left. Between them whoever works for these hands begins
    /// nothing that takes long.
    fn hold(&mut self, _held: bool) {}

    /// What needs no letter: when there is something, and doing it.
    fn next_due(&self) -> Option<Instant>;
    fn do_what_is_due(&mut self);

    /// Lays a service aside whose scanning thread has died; whether there was one.
    fn bury(&mut self) -> bool;

    /// Of a service that has ended by the letter at hand.
    fn take_account(&mut self) -> Option<Self::Account>;

    /// What was to be done is done.
    fn settled(&self, lifecycle: &Lifecycle);

    /// The supervisor ends, not the VM: what is shared stays shared, and the discarder knows it.
    fn end(&mut self);
}

/// See the [module](self).
pub(crate) struct Driver<H: Hands> {
    pub(super) hands: H,
    pub(super) lifecycle: Lifecycle,
    pub(super) keeps: Vec<(Vec<Range<usize>>, Keep)>,
    /// Pins of which nobody tells the end.
    watched: Watched,
    /// What failed first of what the letter at hand asked for.
    pub(super) failed: Option<Error>,
    /// Whoever waits is told what fails: no need to warn of it.
    pub(super) told: bool,
}

impl<H: Hands> Driver<H> {
    pub(crate) fn of(hands: H, lifecycle: Lifecycle) -> Self {
        Self {
            hands,
            lifecycle,
            keeps: Vec::new(),
            watched: Watched::default(),
            failed: None,
            told: false,
        }
    }

    /// Works until the supervisor ends.
    pub(crate) fn run(&mut self, letters: &Mailbox<Letter<H::Ask>, Answer<H::Account>>) {
        loop {
            let due = [
                self.lifecycle.next_due(),
                self.watched.next_due(),
                self.hands.next_due(),
            ];
            match letters.next(due.into_iter().flatten().min()) {
                Some((ticket, Letter::End)) => {
                    self.hands.end();
                    self.keeps.clear();
                    return letters.answer(ticket, (Ok(()), None));
                }
                Some((ticket, letter)) => self.take(letter, letters, ticket),
                None => {}
            }
            self.look_for_ends();
            self.heed_death();
            self.hands.do_what_is_due();
            // One thing, which may wait for a store: then letters come first.
            if let Some(effect) = self.lifecycle.next(self.hands.now(), true) {
                self.work(&effect);
                self.work_off(false);
            }
            self.failed = None;
            self.hands.settled(&self.lifecycle);
        }
    }

    /// Does what a letter asks for, and answers it.
    fn take(
        &mut self,
        letter: Letter<H::Ask>,
        letters: &Mailbox<Letter<H::Ask>, Answer<H::Account>>,
        ticket: Ticket,
    ) {
        // What is due by itself is not what the letter asks for, but where it says so.
        let hurry = matches!(letter, Letter::Event(Event::Hurry));
        let ends = matches!(letter, Letter::Event(Event::Detach { .. }));
        let mut watch = None;
        let handled = match letter {
            Letter::Ask(ask) => H::take(self, ask),
            Letter::Add(spans, keep) => self.add(spans, keep),
            Letter::Event(event) => self.handle(event),
            Letter::PinWhile(still) => {
                watch = Some(still);
                self.handle(Event::Pin)
            }
            Letter::End => Ok(()),
        };
        self.told = hurry;
        self.work_off(hurry);
        self.told = false;
        if let Some(still) = watch {
            // Giving memory back takes time, and whoever asked comes to its device only behind that.
            self.watched.add(still, self.hands.now());
        }
        self.heed_death();
        if ends {
            self.keeps.clear();
        }
        let done = handled.and(self.failed.take().map_or(Ok(()), Err));
        self.hands.settled(&self.lifecycle);
        letters.answer(ticket, (done, self.hands.take_account()));
    }

    pub(super) fn handle(&mut self, event: Event) -> Result<(), Error> {
        self.lifecycle.handle(event, self.hands.now())
    }

    /// Pins that nobody sees any more have ended.
    fn look_for_ends(&mut self) {
        for _ in 0..self.watched.end(self.hands.now()) {
            // It always fits.
            let _ = self.handle(Event::LetGo);
            self.work_off(false);
        }
    }

    /// A service whose scanning thread has died does nothing any more, and the VM is refused. What is shared stays so, and is right.
    fn heed_death(&mut self) {
        if self.hands.bury() {
            self.lifecycle.service_died(refusal::service_died());
            self.work_off(false);
        }
    }

    /// Carries out what is to be done, and with `due` also what is due by itself.
    pub(super) fn work_off(&mut self, due: bool) {
        // What fails meanwhile is due again only later, however long the others take.
        let now = self.hands.now();
        self.hands.hold(true);
        while let Some(effect) = self.lifecycle.next(now, due) {
            self.work(&effect);
        }
        self.hands.hold(false);
    }

    /// Carries out an effect, and tells how it went.
    pub(super) fn work(&mut self, effect: &Effect) {
        let done = H::carry_out(self, effect).map_err(|error| match error {
            // A service's. To whoever asks the supervisor it means that there is none.
            Error::Stopped => Error::Refused(refusal::service_died()),
            error => error,
        });
        if let Effect::Forget(range) = effect {
            self.let_go(range);
        }
        let outcome = match &done {
            Ok(()) => Outcome::Done,
            Err(error) if error.may_pass() => Outcome::Passes(error.into()),
            Err(error) => Outcome::Fails(error.into()),
        };
        self.lifecycle.done(effect, outcome, self.hands.now());
        // An announcement comes by itself: whoever refuses a VM has refused it.
        if let (Err(error), false) = (done, matches!(effect, Effect::Announce(..))) {
            self.failed.get_or_insert(error);
        }
    }

    fn add(&mut self, spans: Vec<Span>, keep: Option<Keep>) -> Result<(), Error> {
        let ranges = spans.iter().map(|span| span.range.clone()).collect();
        for span in spans {
            self.handle(Event::Add(span))?;
        }
        // Without a VM there is nothing to keep memory for.
        self.keeps.extend(keep.map(|keep| (ranges, keep)));
        Ok(())
    }

    /// Nobody needs what keeps only memory alive that is gone.
    fn let_go(&mut self, gone: &Range<usize>) {
        for (ranges, _) in &mut self.keeps {
            let left = |range: &Range<usize>| complement(range, std::slice::from_ref(gone));
            *ranges = ranges.iter().flat_map(left).collect();
        }
        self.keeps.retain(|(ranges, _)| !ranges.is_empty());
    }
}
