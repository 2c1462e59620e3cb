//! What a producer does about the room that arenas have.

use transport_core::{Error, ErrorKind, Result};

use super::{Producer, Task};

impl Producer {
    /// Whether only samples that fit where the arenas have room can go on: there was none for what
    /// was sent, and consumers make none before their window is whole.
    pub(super) fn is_crowded(&self) -> bool {
        self.refused && self.window.usage().samples < self.quantum
    }

    /// Whether a part of the arenas is left free, so that large samples find room in one piece.
    pub(super) fn is_sparing(&self) -> bool {
        !self.tight && !self.is_crowded()
    }

    /// Asks the servers how much room their arenas have in one piece.
    pub(super) fn ask_for_room(&self) {
        let (client, room) = (self.client.clone(), self.room.clone());
        let urls = self.options.servers.clone();
        tokio::spawn(async move {
            let mut most = None;
            for url in &urls {
                most = most.max(client.largest_free(url).await);
            }
            *room.lock() = most;
        });
    }

    /// Fails where the next sample fits nowhere and nothing would ever make room for it: consumers
    /// settle whole windows only.
    pub(super) fn check_room(&mut self) -> Result<()> {
        let layout = self.client.layout();
        let size = |task: &Task| task.bytes(|tokens| layout.bytes(tokens));
        let Some(next) = self.pool.oldest() else { return Ok(()) };
        let usage = self.window.usage();
        let sparing = self.is_sparing();
        if usage.samples >= self.quantum || self.router.pick(size(next), sparing).is_some() {
            return Ok(());
        }
        self.pool.smallest_first(size); // one that fits finishes the window as well
        let next = self.pool.oldest().expect("looked at above");
        let bytes = size(next);
        if self.router.pick(bytes, sparing).is_some() {
            return Ok(());
        }
        if self.router.pick(bytes, false).is_some() {
            self.tight = true;
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::ConfigInvalid,
            "produce",
            "the next sample does not fit beside the unfinished quantum",
        )
        .with("sample_id", &next.sample_id)
        .with("sample_bytes", bytes)
        .with("unacknowledged_samples", usage.samples)
        .with("unacknowledged_bytes", usage.bytes)
        .with("arenas_bytes", self.router.arenas())
        .remedy("give larger arenas, more servers, or a smaller quantum"))
    }
}
