//! What wakes a watch: rung by a change, heard once. One watch has one bell and waits for it in one place, so a flag and a
//! waker do; it is asked a hundred times for each time that it rings.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures::task::AtomicWaker;

/// Rung by whoever changes something, heard by one watch.
#[derive(Debug, Default)]
pub(super) struct Bell {
    rung: AtomicBool,
    waiter: AtomicWaker,
}

impl Bell {
    /// Wakes whoever waits, or the next one who would.
    pub(super) fn ring(&self) {
        self.rung.store(true, Ordering::Release);
        self.waiter.wake();
    }

    /// Ready if it was rung since it was heard last.
    pub(super) fn poll_heard(&self, context: &Context<'_>) -> Poll<()> {
        if self.rung.swap(false, Ordering::AcqRel) {
            return Poll::Ready(());
        }
        self.waiter.register(context.waker());
        // It may have been rung in between, by a ring that found nobody waiting.
        if self.rung.swap(false, Ordering::AcqRel) { Poll::Ready(()) } else { Poll::Pending }
    }
}
