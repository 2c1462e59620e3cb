//! Transfers that run, and the memory of those that nobody waits for any more.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
};

use parking_lot::Mutex;

const RUNNING: u8 = 0;
const ABANDONED: u8 = 1;

/// Keeps account of the transfers of one transport.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    quarantined: Arc<AtomicU64>,
    running: Mutex<Vec<Weak<AtomicBool>>>,
}

/// One transfer, from its start until its memory is out of its hands.
#[derive(Debug)]
pub(super) struct Transfer {
    stop: Arc<AtomicBool>,
    account: Arc<Account>,
}

#[derive(Debug)]
struct Account {
    bytes: u64,
    state: AtomicU8,
    quarantined: Arc<AtomicU64>,
}

/// Stops the transfer and puts its memory into quarantine, unless it is disarmed.
#[derive(Debug)]
pub(super) struct AbandonOnDrop(Option<(Arc<AtomicBool>, Weak<Account>)>);

impl Transfers {
    /// A transfer that may write `bytes` of somebody's memory.
    pub(super) fn begin(&self, bytes: u64) -> Transfer {
        let stop = Arc::new(AtomicBool::new(false));
        let mut running = self.running.lock();
        running.retain(|flag| flag.strong_count() > 0);
        running.push(Arc::downgrade(&stop));
        let quarantined = self.quarantined.clone();
        let account = Arc::new(Account { bytes, state: AtomicU8::new(RUNNING), quarantined });
        Transfer { stop, account }
    }

    /// Memory that transfers may still write although nobody waits for them.
    pub(super) fn quarantined(&self) -> u64 {
        self.quarantined.load(Ordering::Relaxed)
    }

    /// Ends whatever runs, soon.
    pub(super) fn stop_all(&self) {
        for flag in self.running.lock().iter().filter_map(Weak::upgrade) {
            flag.store(true, Ordering::Relaxed);
        }
    }
}

impl Transfer {
    pub(super) fn stop_flag(&self) -> &Arc<AtomicBool> {
        &self.stop
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(super) fn abandon_on_drop(&self) -> AbandonOnDrop {
        AbandonOnDrop(Some((self.stop.clone(), Arc::downgrade(&self.account))))
    }
}

impl AbandonOnDrop {
    pub(super) fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        let Some((stop, account)) = self.0.take() else { return };
        stop.store(true, Ordering::Relaxed);
        if let Some(account) = account.upgrade()
            && account.state.swap(ABANDONED, Ordering::Relaxed) == RUNNING
        {
            account.quarantined.fetch_add(account.bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if *self.state.get_mut() == ABANDONED {
            self.quarantined.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_abandoned_transfers_are_in_quarantine_and_only_while_they_run() {
        let transfers = Transfers::default();
        let waited_for = transfers.begin(10);
        waited_for.abandon_on_drop().disarm();
        let dropped = transfers.begin(7);
        drop(dropped.abandon_on_drop());
        assert!(dropped.is_stopped() && !waited_for.is_stopped());
        assert_eq!(transfers.quarantined(), 7);
        drop(dropped);
        assert_eq!(transfers.quarantined(), 0);
        transfers.stop_all();
        assert!(waited_for.is_stopped());
        let over = transfers.begin(5);
        let late = over.abandon_on_drop();
        drop(over);
        drop(late);
        assert_eq!(transfers.quarantined(), 0);
    }
}
