//! Segments of Mooncake Store, read over the same wire.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

use mooncake_sys::{SegmentRead, SegmentReader};
use transport_core::{Result, SessionName};

use super::{ReadOp, ReadOptions, TcpEngine};

/// A peer without a data port answers [`Unsupported`](transport_core::ErrorKind::Unsupported).
impl SegmentReader for TcpEngine {
    fn name(&self) -> &str {
        "the native tcp engine"
    }

    fn read(
        &self,
        segment: &SessionName,
        reads: Vec<SegmentRead>,
        deadline: Instant,
        stop: &Arc<AtomicBool>,
    ) -> (Vec<SegmentRead>, Result<()>) {
        let op = |SegmentRead { address, dst }| ReadOp::new(address, dst);
        let mut ops: Vec<ReadOp> = reads.into_iter().map(op).collect();
        let options = ReadOptions::default().deadline(deadline).stop(stop.clone());
        let result = Self::read(self, segment, &mut ops, &options);
        let read = |ReadOp { address, dst, .. }| SegmentRead { address, dst };
        (ops.into_iter().map(read).collect(), result)
    }

    fn close(&self) {
        Self::close(self);
    }
}
