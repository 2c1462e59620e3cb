//! The conformance suite over the reference transport, alone and under each layer, one test a case.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use transport_core::{
    Dtype, ErrorKind, MemoryTransport, RegionSlice, Result, Tensor, TensorMeta, Transport,
    conformance::{self, Harness, Hook, Pair, Setup},
    layers::{
        Fault, FaultLayer, LimitLayer, MetricsLayer, Operation, RetryLayer, Stack, TimeoutLayer,
        TraceLayer,
    },
};

/// Puts layers around a transport.
type Wrap = fn(Arc<dyn Transport>) -> Arc<dyn Transport>;

/// Owner and clients of one store, each under the same layers.
#[derive(Debug)]
struct Memory {
    layers: &'static str,
    wrap: Wrap,
}

impl Memory {
    const BARE: Self = Self { layers: "none", wrap: |transport| transport };
}

#[async_trait]
impl Harness for Memory {
    fn name(&self) -> String {
        format!("memory, publisher and consumer apart, layers: {}", self.layers)
    }

    fn offers(&self, hook: Hook) -> bool {
        matches!(
            hook,
            Hook::KillPublisher | Hook::OlderPeer | Hook::SecondConsumer | Hook::TransferDelay
        )
    }

    async fn pair(&self, setup: &Setup) -> Result<Pair> {
        let publisher = owner(setup)?;
        let (first, second) = (publisher.client(), publisher.client());
        let publisher: Arc<dyn Transport> = Arc::new(publisher);
        let killed = publisher.clone();
        Ok(Pair::new((self.wrap)(publisher), (self.wrap)(Arc::new(first)))
            .second_consumer((self.wrap)(Arc::new(second)))
            .on_kill(Box::new(move || Box::pin(async move { killed.close().await }))))
    }
}

/// One object on both sides, and nothing beyond the pair.
#[derive(Debug)]
struct OneObject;

#[async_trait]
impl Harness for OneObject {
    fn name(&self) -> String {
        "memory, one object".into()
    }

    async fn pair(&self, setup: &Setup) -> Result<Pair> {
        let transport: Arc<dyn Transport> = Arc::new(owner(setup)?);
        Ok(Pair::new(transport.clone(), transport))
    }
}

fn owner(setup: &Setup) -> Result<MemoryTransport> {
    MemoryTransport::builder()
        .arena_bytes(setup.arena_bytes)
        .older_peer(setup.older_peer)
        .transfer_delay(setup.transfer_delay)
        .build()
}

/// Everything, in the recommended order.
fn full_stack(transport: Arc<dyn Transport>) -> Arc<dyn Transport> {
    let faults =
        FaultLayer::seeded(5).with(Fault::delay(Duration::from_millis(1)).probability(0.2));
    Stack::from_shared(transport)
        .with(&faults)
        .with(&LimitLayer::new().calls(8).bytes(8 << 20))
        .with(&TimeoutLayer::new())
        .with(&RetryLayer::new().seed(5))
        .with(&MetricsLayer::new())
        .with(&TraceLayer::new())
        .build()
}

/// Faults that retries must hide. Answers are not lost, so no call does its work twice; fetches into
/// the caller's regions are not retried, so fetches are left alone.
fn hidden_faults(transport: Arc<dyn Transport>) -> Arc<dyn Transport> {
    let busy = |operation| Fault::fail(ErrorKind::Busy).on(operation).probability(0.2);
    let faults = FaultLayer::random()
        .with(busy(Operation::Publish))
        .with(busy(Operation::Release))
        .with(busy(Operation::Health));
    let retry =
        RetryLayer::new().attempts(30).pauses(Duration::from_micros(100), Duration::from_millis(2));
    Stack::from_shared(transport).with(&faults).with(&retry).build()
}

mod bare {
    transport_core::conformance_tests!(super::Memory::BARE, not_applicable: []);
}

mod one_object {
    transport_core::conformance_tests!(super::OneObject, not_applicable: [
        "a_view_outlives_its_consumer",
        "a_dropped_fetch_is_quarantined_until_over",
        "a_killed_publisher_is_an_error_in_time",
        "a_missing_capability_is_an_error",
        "a_replaced_life_waits_for_all_holders",
        "a_sample_goes_with_its_last_holder",
        "a_stranger_cannot_take_memory_from_a_holder",
        "a_view_outlives_its_consumer",
        "what_drains_goes_when_it_is_let_go",
        "an_older_publisher_is_read",
        "close_ends_the_consumer",
    ]);
}

/// One module per stack of layers.
macro_rules! under {
    ($($module:ident: $wrap:expr;)*) => {$(
        mod $module {
            #[allow(unused_imports)]
            use super::*;

            transport_core::conformance_tests!(
                Memory { layers: stringify!($module), wrap: $wrap },
                not_applicable: []
            );
        }
    )*};
}

under! {
    fault: |t| Stack::from_shared(t).with(&FaultLayer::seeded(5)).build();
    limit: |t| Stack::from_shared(t).with(&LimitLayer::new().calls(2).bytes(1 << 20)).build();
    metrics: |t| Stack::from_shared(t).with(&MetricsLayer::new()).build();
    retry: |t| Stack::from_shared(t).with(&RetryLayer::new().seed(5)).build();
    timeout: |t| Stack::from_shared(t).with(&TimeoutLayer::new()).build();
    trace: |t| Stack::from_shared(t).with(&TraceLayer::new()).build();
    everything: full_stack;
    retried_faults: hidden_faults;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_report_lists_every_case() {
    let report = conformance::run_all(&Memory::BARE).await;
    assert_eq!(report.verdict(&[]), Ok(()));
    let names: Vec<_> = report.cases.iter().map(|c| c.name).collect();
    let listed: Vec<_> = conformance::cases().iter().map(|c| c.name).collect();
    assert_eq!(names, listed);
    println!("{report}");
}

/// A tensor is its elements, one after the other: what has gaps has another length, and is refused.
#[test]
fn f38_a_view_with_strides_is_no_tensor() {
    let matrix: Vec<u8> = (0..12i32).flat_map(i32::to_le_bytes).collect(); // 3 rows of 4
    let matrix = RegionSlice::copy_of(&matrix);
    let column = TensorMeta::new(Dtype::Int32, [3]).unwrap();
    // From its first element to its last, with the other columns in between.
    let error = Tensor::new(column.clone(), matrix.slice(4..4 + 2 * 16 + 4).unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert_eq!((error.context("expected"), error.context("found")), (Some("12"), Some("36")));
    let gathered = [1i32, 5, 9].map(i32::to_le_bytes).concat();
    Tensor::new(column, RegionSlice::copy_of(&gathered)).unwrap();
    // No dimension is one element, and any dimension of none is none.
    for (shape, bytes) in [(&[][..], 4), (&[4, 3], 48), (&[7, 0, 2], 0)] {
        let meta = TensorMeta::new(Dtype::Int32, shape).unwrap();
        Tensor::new(meta.clone(), matrix.slice(0..bytes).unwrap()).unwrap();
        let other = matrix.slice(0..(bytes + 4) % 52).unwrap();
        assert!(Tensor::new(meta, other).is_err(), "{shape:?}");
    }
}
