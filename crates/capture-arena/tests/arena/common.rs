//! What several tests need.

use std::time::Duration;

use capture_arena::{
    Arena, ArenaConfig, Backing, FreeOutcome, FreeRequest, HoldOutcome, HoldRequest,
};
use capture_arena::{ObjectList, ReserveOptions, SamplePlan};
use transport_core::{
    ClientId, Dtype, FeatureName, Generation, SampleId, SampleKey, Sequence, StoreId, TensorMeta,
};

pub(crate) fn arena(bytes: u64) -> Arena {
    Arena::start(Backing::heap(bytes).unwrap(), ArenaConfig::default()).unwrap()
}

pub(crate) fn sample(id: &str) -> SampleKey {
    SampleKey::new(StoreId::new("s").unwrap(), SampleId::new(id).unwrap(), Generation(1))
}

/// A sample with objects `x0`, `x1`, … of these sizes.
pub(crate) fn plan(id: &str, sizes: &[u64]) -> SamplePlan {
    let object = |(i, &bytes): (usize, &u64)| {
        let name = FeatureName::new(format!("x{i}")).unwrap();
        (name, TensorMeta::new(Dtype::Uint8, [bytes]).unwrap())
    };
    SamplePlan {
        sample: sample(id),
        objects: sizes.iter().enumerate().map(object).collect(),
        holder: None,
    }
}

pub(crate) fn key(id: &str, object: usize) -> String {
    format!("s/{id}/g1/x{object}")
}

pub(crate) fn keys(keys: &[String]) -> ObjectList {
    keys.iter().map(|k| (k, None::<Sequence>)).collect()
}

pub(crate) fn client(name: &str) -> ClientId {
    ClientId::new(name).unwrap()
}

pub(crate) fn soon(ms: u64) -> ReserveOptions {
    ReserveOptions::default().deadline(Duration::from_millis(ms))
}

pub(crate) fn free(arena: &Arena, client: Option<&ClientId>, objects: ObjectList) -> FreeOutcome {
    let (reply, outcome) = std::sync::mpsc::channel();
    arena.free(FreeRequest {
        client: client.cloned(),
        objects,
        reply: Some(Box::new(move |o| drop(reply.send(o)))),
    });
    outcome.recv_timeout(Duration::from_secs(10)).unwrap()
}

pub(crate) fn hold(arena: &Arena, client: &ClientId, objects: ObjectList) -> HoldOutcome {
    let (reply, outcome) = std::sync::mpsc::channel();
    arena.hold(HoldRequest {
        client: client.clone(),
        objects,
        reply: Some(Box::new(move |o| drop(reply.send(o)))),
    });
    outcome.recv_timeout(Duration::from_secs(10)).unwrap()
}

/// Has the owner thread at the books until the answer is dropped: it hears of a free for so long.
pub(crate) fn keep_busy(arena: &Arena) -> std::sync::mpsc::Sender<()> {
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (begin, begun) = std::sync::mpsc::channel();
    let many: Vec<_> = (0..100).map(|i| key("nobody's", i)).collect(); // too many to be done in passing
    let reply = move |_| {
        begin.send(()).unwrap();
        let _ = released.recv(); // dropped
    };
    arena.free(FreeRequest { client: None, objects: keys(&many), reply: Some(Box::new(reply)) });
    begun.recv().unwrap();
    release
}
