//! Cases about descriptors that promise something else than what is there.

use std::sync::Arc;

use super::{
    Pair,
    context::{
        Returns, Spec, Stop, Verdict, ensure, expect_error, fetch_and_check, fetch_one,
        fetch_options, key, publication, publish_one, release_now, settled, with_feature,
    },
};
use crate::{
    Descriptor, Destination, Dtype, Epoch, ErrorKind, FetchRequest, Location, RemoteAddr, Sequence,
    TensorMeta,
};

/// The tensor that the descriptors lie about, between two others.
const VICTIM: &str = "victim";
const SPECS: &[Spec<'static>] = &[
    ("before", Dtype::Uint8, &[4096]),
    (VICTIM, Dtype::Float32, &[100]),
    ("after", Dtype::Uint8, &[4096]),
];

pub(super) async fn another_epoch_is_refused(pair: &mut Pair) -> Verdict {
    let descriptor = published(pair).await?;
    let Some(other) = with_another_epoch(&descriptor) else {
        return Err(Stop::NotApplicable("descriptors have no epoch".into()));
    };
    refused(pair, &descriptor, other, &[ErrorKind::Stale, ErrorKind::PeerGone]).await
}

pub(super) async fn another_sequence_is_refused(pair: &mut Pair) -> Verdict {
    let descriptor = published(pair).await?;
    let Some(seq) = descriptor.features[VICTIM].seq else {
        return Err(Stop::NotApplicable("descriptors have no sequence numbers".into()));
    };
    for other in [Sequence(seq.0 + 1000), Sequence(seq.0.wrapping_sub(1)), Sequence(0)] {
        let wrong = with_feature(&descriptor, VICTIM, |f| f.seq = Some(other));
        let result = fetch_victim(pair, wrong).await;
        let kinds = &[ErrorKind::Stale, ErrorKind::NotFound];
        expect_error(&format!("a fetch of {other:?} instead of {seq:?}"), result, kinds, ALL)?;
    }
    still_there(pair, &descriptor).await
}

pub(super) async fn an_address_outside_the_arena_is_refused(pair: &mut Pair) -> Verdict {
    let (descriptor, address) = published_at(pair).await?;
    let arena = pair.publisher.health().await?.arena_bytes.max(1 << 30);
    let below = address.0.checked_sub(arena).map_or(RemoteAddr(0), RemoteAddr);
    for wrong in [RemoteAddr(address.0 + arena), below, RemoteAddr(0), RemoteAddr(u64::MAX - 1)] {
        address_refused(pair, &descriptor, wrong).await?;
    }
    still_there(pair, &descriptor).await
}

pub(super) async fn an_address_beside_the_object_is_refused(pair: &mut Pair) -> Verdict {
    let (descriptor, address) = published_at(pair).await?;
    for wrong in [address.0 + 1, address.0 - 1, address.0 + 400, address.0 - 400] {
        address_refused(pair, &descriptor, RemoteAddr(wrong)).await?;
    }
    still_there(pair, &descriptor).await
}

pub(super) async fn a_longer_tensor_is_refused(pair: &mut Pair) -> Verdict {
    let descriptor = published(pair).await?;
    // One element more, which still lies in the same 512 bytes; the next object as well; and more
    // than there is.
    for rows in [101, 200, 1 << 40] {
        let longer = TensorMeta::new(Dtype::Float32, [rows])?;
        let wrong = with_feature(&descriptor, VICTIM, |f| f.meta = longer);
        let request =
            FetchRequest::new(wrong, Destination::Pool).names(vec![super::context::name(VICTIM)]);
        let result = fetch_one(&pair.consumer, request).await;
        let what = format!("a fetch of {rows} rows of 100");
        let error = expect_error(&what, result, LENGTH_KINDS, ALL)?;
        names_victim(&descriptor, &error)?;
    }
    still_there(pair, &descriptor).await
}

pub(super) async fn a_wider_element_type_is_refused(pair: &mut Pair) -> Verdict {
    let descriptor = published(pair).await?;
    let wider = TensorMeta::new(Dtype::Float64, [100])?;
    let wrong = with_feature(&descriptor, VICTIM, |f| f.meta = wider);
    refused(pair, &descriptor, wrong, LENGTH_KINDS).await
}

pub(super) async fn an_unknown_key_is_refused(pair: &mut Pair) -> Verdict {
    let descriptor = published(pair).await?;
    let mut wrong = (*descriptor).clone();
    wrong.sample = key("never published");
    let wrong = Arc::new(wrong);
    let result =
        fetch_one(&pair.consumer, FetchRequest::new(wrong.clone(), Destination::Pool)).await;
    let kinds = &[ErrorKind::NotFound, ErrorKind::Stale];
    expect_error("fetching a key that was never published", result, kinds, &["key"])?;
    let report = super::context::release(&pair.consumer, &[&wrong]).await?;
    ensure!(
        report.already_gone == 1 && report.released + report.stale == 0,
        "releasing a key that was never published reports {report:?}"
    );
    still_there(pair, &descriptor).await
}

pub(super) async fn one_bad_request_fails_the_call(pair: &mut Pair) -> Verdict {
    let good = published(pair).await?;
    let bad = publish_one(pair, publication(&key("gone"), SPECS, 1)).await?;
    release_now(&pair.consumer, &bad).await?;
    let returns = Returns::default();
    let requests = vec![
        FetchRequest::new(good.clone(), Destination::Into(returns.regions(&good)?)),
        FetchRequest::new(bad.clone(), Destination::Into(returns.regions(&bad)?)),
        FetchRequest::new(good.clone(), Destination::Into(returns.regions(&good)?)),
    ];
    let result = pair.consumer.fetch(requests, fetch_options()).await;
    let kinds = &[ErrorKind::NotFound, ErrorKind::Stale, ErrorKind::OutOfRange];
    let error = expect_error("a call with one released sample", result, kinds, &["key"])?;
    let named = error.context("key").unwrap_or_default();
    ensure!(
        bad.keys().any(|key| key.as_str() == named),
        "the error names {named:?}, the bad sample is {}",
        bad.sample
    );
    returns.reach("after a call failed", 3 * SPECS.len()).await?;
    settled("no memory stays in quarantine", &pair.consumer, |h| h.quarantined_bytes == 0).await?;
    still_there(pair, &good).await
}

/// The descriptor as another life of its publisher would have written it; `None` without epochs.
pub(super) fn with_another_epoch(descriptor: &Descriptor) -> Option<Arc<Descriptor>> {
    let mut descriptor = descriptor.clone();
    match &mut descriptor.location {
        Location::Arena(arena) => {
            let epoch = arena.epoch?;
            arena.epoch = Some(Epoch(if epoch.0 > 1 { epoch.0 - 1 } else { 2 }));
        }
        _ => return None,
    }
    Some(Arc::new(descriptor))
}

const ALL: &[&str] = &["key", "expected", "found"];
const LENGTH_KINDS: &[ErrorKind] = &[
    ErrorKind::Corrupt,
    ErrorKind::InvalidInput,
    ErrorKind::OutOfRange,
    ErrorKind::ShortRead,
    ErrorKind::Stale,
];

async fn published(pair: &Pair) -> Verdict<Arc<Descriptor>> {
    publish_one(pair, publication(&key("true"), SPECS, 1)).await
}

async fn published_at(pair: &Pair) -> Verdict<(Arc<Descriptor>, RemoteAddr)> {
    let descriptor = published(pair).await?;
    match descriptor.features[VICTIM].address {
        Some(address) => Ok((descriptor, address)),
        None => Err(Stop::NotApplicable("descriptors have no addresses".into())),
    }
}

async fn fetch_victim(pair: &Pair, descriptor: Arc<Descriptor>) -> crate::Result<crate::Fetched> {
    let request =
        FetchRequest::new(descriptor, Destination::Pool).names(vec![super::context::name(VICTIM)]);
    fetch_one(&pair.consumer, request).await
}

async fn address_refused(pair: &Pair, descriptor: &Descriptor, wrong: RemoteAddr) -> Verdict {
    let kinds = &[ErrorKind::OutOfRange, ErrorKind::Stale, ErrorKind::InvalidInput];
    let moved = with_feature(descriptor, VICTIM, |f| f.address = Some(wrong));
    let what = format!("a fetch from {:#x}", wrong.0);
    let error = expect_error(&what, fetch_victim(pair, moved).await, kinds, ALL)?;
    names_victim(descriptor, &error)
}

async fn refused(
    pair: &Pair,
    descriptor: &Arc<Descriptor>,
    wrong: Arc<Descriptor>,
    kinds: &[ErrorKind],
) -> Verdict {
    let returns = Returns::default();
    let regions = vec![returns.region(wrong.features[VICTIM].meta.nbytes())?];
    let request = FetchRequest::new(wrong, Destination::Into(regions))
        .names(vec![super::context::name(VICTIM)]);
    let result = fetch_one(&pair.consumer, request).await;
    let error = expect_error("a fetch by a wrong descriptor", result, kinds, ALL)?;
    names_victim(descriptor, &error)?;
    returns.reach("after a refused fetch", 1).await?;
    still_there(pair, descriptor).await
}

fn names_victim(descriptor: &Descriptor, error: &crate::Error) -> Verdict {
    let key = descriptor.sample.object(&super::context::name(VICTIM));
    ensure!(
        error.context("key") == Some(key.as_str()),
        "the error names {:?}, the wrong object is {key}",
        error.context("key")
    );
    Ok(())
}

async fn still_there(pair: &Pair, descriptor: &Arc<Descriptor>) -> Verdict {
    fetch_and_check(&pair.consumer, descriptor, 1).await?;
    release_now(&pair.consumer, descriptor).await?;
    settled("nothing is left", &pair.publisher, |h| h.resident_samples == 0).await?;
    Ok(())
}
