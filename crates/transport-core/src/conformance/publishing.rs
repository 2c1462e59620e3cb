//! Cases about publishing: all or nothing, replacing, and sources that become final late.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Pair,
    context::{
        PLAIN, Spec, Verdict, check_bytes, ensure, expect_error, expected, fetch_and_check,
        fetch_one, fetch_pool, key, meta, name, publication, publish, publish_one, publish_options,
        publish_plain, publish_with, release, release_now, settled,
    },
};
use crate::{
    Destination, Error, ErrorKind, FetchRequest, Publication, PublishOptions, Ready, Result,
    SampleKey, Tensor, Writer, memory::LateSource,
};

pub(super) async fn a_duplicate_key_undoes_the_batch(pair: &mut Pair) -> Verdict {
    let held = publish_plain(pair, "held", 1).await?;
    let before = pair.publisher.health().await?;
    let batch = ["new 1", "new 2", "held", "new 3"]
        .map(|sample| publication(&key(sample), PLAIN, 2))
        .to_vec();
    let result = pair.publisher.publish(batch, publish_options()).await;
    let kinds = &[ErrorKind::AlreadyExists];
    let error = expect_error("publishing a key twice", result, kinds, &["key"])?;
    let named = error.context("key").unwrap_or_default();
    ensure!(
        held.keys().any(|key| key.as_str() == named),
        "the error names {named:?}, the duplicate is {:?}",
        held.sample
    );
    settled("every byte placed is free again", &pair.publisher, |h| {
        (h.arena_free_bytes, h.resident_samples, h.reserved_bytes, h.published_samples)
            == (
                before.arena_free_bytes,
                before.resident_samples,
                before.reserved_bytes,
                before.published_samples,
            )
    })
    .await?;
    fetch_and_check(&pair.consumer, &held, 1).await?;
    // The keys of the batch are as free as its bytes.
    for sample in ["new 1", "new 2", "new 3"] {
        let descriptor = publish_plain(pair, sample, 3).await?;
        fetch_and_check(&pair.consumer, &descriptor, 3).await?;
        release_now(&pair.consumer, &descriptor).await?;
    }
    release_now(&pair.consumer, &held).await
}

pub(super) async fn one_key_twice_in_a_batch_is_refused(pair: &mut Pair) -> Verdict {
    let before = pair.publisher.health().await?;
    for replace in [false, true] {
        let batch = ["a", "b", "a"].map(|sample| publication(&key(sample), PLAIN, 1)).to_vec();
        let result = pair.publisher.publish(batch, publish_options().replace(replace)).await;
        let kinds = &[ErrorKind::AlreadyExists, ErrorKind::InvalidInput];
        expect_error("publishing a batch with one key twice", result, kinds, &["key"])?;
    }
    settled("every byte placed is free again", &pair.publisher, |h| {
        h.arena_free_bytes == before.arena_free_bytes
            && h.resident_samples == before.resident_samples
    })
    .await?;
    let descriptor = publish_plain(pair, "a", 2).await?;
    fetch_and_check(&pair.consumer, &descriptor, 2).await?;
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn a_key_is_free_after_its_release(pair: &mut Pair) -> Verdict {
    for salt in 0..5 {
        let descriptor = publish_plain(pair, "reused", salt).await?;
        fetch_and_check(&pair.consumer, &descriptor, salt).await?;
        release_now(&pair.consumer, &descriptor).await?;
    }
    Ok(())
}

pub(super) async fn replacing_shows_the_new_bytes(pair: &mut Pair) -> Verdict {
    let before = pair.publisher.health().await?;
    publish_plain(pair, "replaced", 1).await?;
    let new = replace(pair, "replaced", 2).await?;
    fetch_and_check(&pair.consumer, &new, 2).await?;
    // A key that did not exist may be replaced as well.
    let fresh = replace(pair, "fresh", 3).await?;
    fetch_and_check(&pair.consumer, &fresh, 3).await?;
    let report = release(&pair.consumer, &[&new, &fresh]).await?;
    ensure!(report.released + report.unconfirmed == 2, "both were held, but: {report:?}");
    settled("all three lives went", &pair.publisher, |h| {
        h.arena_free_bytes == before.arena_free_bytes
            && h.resident_samples == 0
            && h.published_samples == h.released_samples
    })
    .await?;
    Ok(())
}

pub(super) async fn a_replaced_life_cannot_be_fetched(pair: &mut Pair) -> Verdict {
    let old = publish_plain(pair, "replaced", 1).await?;
    let new = replace(pair, "replaced", 2).await?;
    let kinds = &[ErrorKind::Stale, ErrorKind::NotFound];
    // Before and after the consumer has seen the new life.
    for _ in 0..2 {
        let result = fetch_pool(&pair.consumer, &old).await;
        expect_error("fetching what was replaced and held by nobody", result, kinds, &["key"])?;
        fetch_and_check(&pair.consumer, &new, 2).await?;
    }
    release_now(&pair.consumer, &new).await
}

pub(super) async fn the_replaced_life_drains(pair: &mut Pair) -> Verdict {
    let before = pair.publisher.health().await?;
    let old = publish_plain(pair, "draining", 1).await?;
    fetch_and_check(&pair.consumer, &old, 1).await?;
    let new = replace(pair, "draining", 2).await?;
    let both = pair.publisher.health().await?;
    ensure!(
        both.resident_samples == 2,
        "the old life is held and the new one published, but {} samples are resident",
        both.resident_samples
    );
    fetch_and_check(&pair.consumer, &new, 2).await?;
    release_now(&pair.consumer, &old).await?;
    settled("the old life went", &pair.publisher, |h| h.resident_samples == 1).await?;
    fetch_and_check(&pair.consumer, &new, 2).await?;
    release_now(&pair.consumer, &new).await?;
    settled("every byte is free again", &pair.publisher, |h| {
        h.arena_free_bytes == before.arena_free_bytes && h.resident_samples == 0
    })
    .await?;
    Ok(())
}

pub(super) async fn views_of_the_replaced_life_stay(pair: &mut Pair) -> Verdict {
    let old = publish_plain(pair, "viewed", 1).await?;
    let request = FetchRequest::new(old.clone(), Destination::View);
    let view = fetch_one(&pair.consumer, request).await?;
    let mut newer = Vec::new();
    for salt in 2..12 {
        newer.push(replace(pair, "viewed", salt).await?);
        check_bytes(&view, 1)?;
    }
    let newest = newer.last().expect("ten lives");
    fetch_and_check(&pair.consumer, newest, 11).await?;
    check_bytes(&view, 1)?;
    drop(view);
    release_now(&pair.consumer, &old).await?;
    release_now(&pair.consumer, newest).await
}

pub(super) async fn a_holder_reads_a_draining_life_again(pair: &mut Pair) -> Verdict {
    let old = publish_plain(pair, "read again", 1).await?;
    fetch_and_check(&pair.consumer, &old, 1).await?;
    let new = replace(pair, "read again", 2).await?;
    fetch_and_check(&pair.consumer, &old, 1).await?;
    fetch_and_check(&pair.consumer, &new, 2).await?;
    release_now(&pair.consumer, &old).await?;
    release_now(&pair.consumer, &new).await
}

pub(super) async fn a_ready_event_orders_the_copy(pair: &mut Pair) -> Verdict {
    let sample = key("late");
    let bytes = expected(&sample, PLAIN[0].0, 1, meta(&PLAIN[0]).nbytes());
    let late = LateSource::new(bytes, Duration::from_millis(150))?;
    let data = late.region();
    let tensor = Tensor::new(meta(&PLAIN[0]), data)?;
    let tensors = [(name(PLAIN[0].0), tensor)].into_iter().collect();
    let late = Publication::new(sample, tensors, Ready::After(Arc::new(late)));
    // Beside a sample that is ready, so that the batch must wait for the slowest.
    let ready = publication(&key("ready"), PLAIN, 1);
    let start = Instant::now();
    let descriptors = publish(pair, vec![ready, late]).await?;
    ensure!(
        start.elapsed() >= Duration::from_millis(150),
        "publish returned after {:?}, before the source was final",
        start.elapsed()
    );
    for descriptor in &descriptors {
        fetch_and_check(&pair.consumer, descriptor, 1).await?;
        release_now(&pair.consumer, descriptor).await?;
    }
    Ok(())
}

pub(super) async fn an_event_that_does_not_happen_undoes_the_batch(pair: &mut Pair) -> Verdict {
    let before = pair.publisher.health().await?;
    let never = LateSource::new(vec![1; 1000], Duration::from_secs(3600))?;
    let data = never.region();
    let tensors = [(name(PLAIN[0].0), Tensor::new(meta(&PLAIN[0]), data)?)].into_iter().collect();
    let never = Publication::new(key("never"), tensors, Ready::After(Arc::new(never)));
    let batch = vec![publication(&key("beside"), PLAIN, 1), never];
    let start = Instant::now();
    let options = PublishOptions::default().deadline(Duration::from_millis(200));
    let result = pair.publisher.publish(batch, options).await;
    expect_error("publishing a source that never gets ready", result, &[ErrorKind::Timeout], &[])?;
    let took = start.elapsed();
    ensure!(took < Duration::from_secs(5), "a deadline of 200 ms took {took:?}");
    settled("every byte placed is free again", &pair.publisher, |h| {
        h.arena_free_bytes == before.arena_free_bytes
            && h.reserved_bytes == before.reserved_bytes
            && h.resident_samples == before.resident_samples
    })
    .await?;
    let descriptor = publish_plain(pair, "beside", 2).await?;
    fetch_and_check(&pair.consumer, &descriptor, 2).await?;
    release_now(&pair.consumer, &descriptor).await
}

pub(super) async fn a_writer_writes_where_it_is_read(pair: &mut Pair) -> Verdict {
    const EMPTY: Spec<'static> = ("nothing", crate::Dtype::Int32, &[0, 4]);
    let specs: Vec<_> = PLAIN.iter().copied().chain([EMPTY]).collect();
    let written = written(&key("written"), &specs, Pattern::of("written", &specs, 1, None));
    let beside = publication(&key("beside"), PLAIN, 1);
    for descriptor in publish(pair, vec![written, beside]).await? {
        fetch_and_check(&pair.consumer, &descriptor, 1).await?;
        release_now(&pair.consumer, &descriptor).await?;
    }
    Ok(())
}

pub(super) async fn a_writer_that_fails_undoes_the_batch(pair: &mut Pair) -> Verdict {
    let before = pair.publisher.health().await?;
    let beside = publication(&key("beside"), PLAIN, 1);
    let pattern = Pattern::of("failing", PLAIN, 1, Some("out of paper"));
    let batch = vec![beside, written(&key("failing"), PLAIN, pattern)];
    let result = pair.publisher.publish(batch, publish_options()).await;
    expect_error("publishing what cannot be written", result, &[ErrorKind::Corrupt], &[])?;
    settled("every byte placed is free again", &pair.publisher, |h| {
        h.arena_free_bytes == before.arena_free_bytes
            && h.reserved_bytes == before.reserved_bytes
            && h.resident_samples == before.resident_samples
    })
    .await?;
    // Both keys are free as well.
    let pattern = Pattern::of("failing", PLAIN, 2, None);
    let batch =
        vec![publication(&key("beside"), PLAIN, 2), written(&key("failing"), PLAIN, pattern)];
    for descriptor in publish(pair, batch).await? {
        fetch_and_check(&pair.consumer, &descriptor, 2).await?;
        release_now(&pair.consumer, &descriptor).await?;
    }
    Ok(())
}

/// Writes what [`publication`] would copy, or fails half-way.
#[derive(Debug)]
struct Pattern {
    tensors: Vec<Vec<u8>>,
    failure: Option<&'static str>,
}

impl Pattern {
    fn of(sample: &str, specs: &[Spec<'_>], salt: u64, failure: Option<&'static str>) -> Self {
        let bytes = |spec: &Spec<'_>| expected(&key(sample), spec.0, salt, meta(spec).nbytes());
        Self { tensors: specs.iter().map(bytes).collect(), failure }
    }
}

impl Writer for Pattern {
    fn write(&self, destinations: &mut [&mut [u8]]) -> Result<()> {
        for (bytes, destination) in self.tensors.iter().zip(destinations) {
            destination.copy_from_slice(bytes);
            if let Some(why) = self.failure {
                return Err(Error::new(ErrorKind::Corrupt, "write", why));
            }
        }
        Ok(())
    }
}

fn written(key: &SampleKey, specs: &[Spec<'_>], pattern: Pattern) -> Publication {
    let tensors = specs.iter().map(|spec| (name(spec.0), meta(spec))).collect();
    Publication::written(key.clone(), tensors, Arc::new(pattern))
}

async fn replace(pair: &Pair, sample: &str, salt: u64) -> Verdict<Arc<crate::Descriptor>> {
    let batch = vec![publication(&key(sample), PLAIN, salt)];
    let mut descriptors = publish_with(pair, batch, publish_options().replace(true)).await?;
    Ok(descriptors.remove(0)) // `publish_with` checked that there is one
}

pub(super) async fn published_bytes_are_a_copy_of_their_own(pair: &mut Pair) -> Verdict {
    // The source memory goes away at once, and other data takes its place.
    let mut published = Vec::new();
    for round in 0..8 {
        let sample = publication(&key(format!("round {round}")), PLAIN, round);
        published.push(publish_one(pair, sample).await?);
        let noise = publication(&key("noise"), PLAIN, 1000 + round);
        drop(noise);
    }
    for (round, descriptor) in published.iter().enumerate() {
        fetch_and_check(&pair.consumer, descriptor, round as u64).await?;
        release_now(&pair.consumer, descriptor).await?;
    }
    Ok(())
}
