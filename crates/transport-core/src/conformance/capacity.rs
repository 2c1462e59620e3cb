//! Cases about an arena that is full.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Pair,
    context::{
        PATIENCE, Spec, Stop, Verdict, ensure, expect_error, fetch_and_check, key, publication,
        publish_one, publish_options, publish_with, release_now, settled,
    },
};
use crate::{Descriptor, Dtype, ErrorKind, Health, Publication, PublishOptions};

/// An arena takes at least this many samples of [`chunk`]; more do not fit.
const CHUNKS: u64 = 8;

pub(super) async fn a_full_arena_waits_for_a_release(pair: &mut Pair) -> Verdict {
    let mut full = fill(pair).await?;
    let (publisher, sample) = (pair.publisher.clone(), chunk(pair, "waiting").await?);
    let waiting =
        tokio::spawn(async move { publisher.publish(vec![sample], publish_options()).await });
    tokio::time::sleep(Duration::from_millis(150)).await;
    ensure!(!waiting.is_finished(), "a publish into a full arena did not wait");
    release_now(&pair.consumer, &full.remove(1)).await?;
    let published = tokio::time::timeout(PATIENCE, waiting)
        .await
        .map_err(|_| Stop::Failed("room came back, but the waiting publish went on".into()))?
        .map_err(|panic| Stop::Failed(format!("publish panicked: {panic}")))??;
    full.extend(published.into_iter().map(Arc::new));
    for descriptor in &full {
        fetch_and_check(&pair.consumer, descriptor, 1).await?;
        release_now(&pair.consumer, descriptor).await?;
    }
    settled("every byte is free again", &pair.publisher, is_empty).await?;
    Ok(())
}

pub(super) async fn a_full_arena_times_out(pair: &mut Pair) -> Verdict {
    let full = fill(pair).await?;
    let before = pair.publisher.health().await?;
    let start = Instant::now();
    let options = PublishOptions::default().deadline(Duration::from_millis(300));
    let batch = vec![chunk(pair, "too much").await?];
    let result = pair.publisher.publish(batch, options).await;
    let took = start.elapsed();
    let kinds = &[ErrorKind::CapacityExceeded];
    expect_error("a publish into a full arena", result, kinds, &["requested_bytes"])?;
    ensure!(
        took >= Duration::from_millis(250) && took < Duration::from_secs(5),
        "a deadline of 300 ms took {took:?}"
    );
    settled("nothing is left behind", &pair.publisher, |h| {
        (h.arena_free_bytes, h.reserved_bytes, h.resident_samples, h.published_samples)
            == (
                before.arena_free_bytes,
                before.reserved_bytes,
                before.resident_samples,
                before.published_samples,
            )
    })
    .await?;
    release_now(&pair.consumer, &full[0]).await?;
    let again = publish_one(pair, chunk(pair, "too much").await?).await?;
    fetch_and_check(&pair.consumer, &again, 1).await?;
    for descriptor in full[1..].iter().chain([&again]) {
        fetch_and_check(&pair.consumer, descriptor, 1).await?;
        release_now(&pair.consumer, descriptor).await?;
    }
    settled("every byte is free again", &pair.publisher, is_empty).await?;
    Ok(())
}

pub(super) async fn a_batch_that_fits_in_part_leaves_nothing(pair: &mut Pair) -> Verdict {
    let mut full = fill(pair).await?;
    release_now(&pair.consumer, &full.remove(0)).await?;
    let before =
        settled("one chunk is free", &pair.publisher, |h| h.resident_samples == full.len() as u64)
            .await?;
    let batch = vec![chunk(pair, "fits").await?, chunk(pair, "does not fit").await?];
    let options = PublishOptions::default().deadline(Duration::from_millis(150));
    let result = pair.publisher.publish(batch, options).await;
    expect_error("a batch that fits in part", result, &[ErrorKind::CapacityExceeded], &[])?;
    settled("nothing is left behind", &pair.publisher, |h| {
        h.arena_free_bytes == before.arena_free_bytes
            && h.reserved_bytes == before.reserved_bytes
            && h.resident_samples == before.resident_samples
    })
    .await?;
    let fits = publish_one(pair, chunk(pair, "fits").await?).await?;
    fetch_and_check(&pair.consumer, &fits, 1).await?;
    for descriptor in full.iter().chain([&fits]) {
        release_now(&pair.consumer, descriptor).await?;
    }
    Ok(())
}

pub(super) async fn more_than_the_arena_is_refused(pair: &mut Pair) -> Verdict {
    let arena = pair.publisher.health().await?.arena_bytes;
    let sample = publication(&key("giant"), &[("x", Dtype::Uint8, &[arena + 1])], 1);
    let options = PublishOptions::default().deadline(Duration::from_millis(150));
    let result = pair.publisher.publish(vec![sample], options).await;
    let kinds = &[ErrorKind::CapacityExceeded];
    expect_error("publishing more than the arena", result, kinds, &["requested_bytes"])?;
    settled("nothing is left behind", &pair.publisher, is_empty).await?;
    Ok(())
}

pub(super) async fn a_dropped_publish_leaves_nothing(pair: &mut Pair) -> Verdict {
    let full = fill(pair).await?;
    let batch = vec![chunk(pair, "given up").await?];
    let publish = pair.publisher.publish(batch, publish_options());
    let early = tokio::time::timeout(Duration::from_millis(50), publish).await;
    ensure!(early.is_err(), "a publish into a full arena did not wait");
    for descriptor in &full {
        release_now(&pair.consumer, descriptor).await?;
    }
    settled("every byte is free again", &pair.publisher, is_empty).await?;
    let again = publish_one(pair, chunk(pair, "given up").await?).await?;
    fetch_and_check(&pair.consumer, &again, 1).await?;
    release_now(&pair.consumer, &again).await?;
    // Dropped in the middle of the copy, or wherever it happens to be.
    for pause in [0, 0, 1, 2] {
        let batch = vec![chunk(pair, "interrupted").await?];
        let publish = pair.publisher.publish(batch, publish_options());
        if let Ok(done) = tokio::time::timeout(Duration::from_millis(pause), publish).await {
            release_now(&pair.consumer, &Arc::new(done?.remove(0))).await?;
        }
        settled("an interrupted publish leaves nothing", &pair.publisher, is_empty).await?;
    }
    Ok(())
}

pub(super) async fn closing_ends_a_waiting_publish(pair: &mut Pair) -> Verdict {
    let full = fill(pair).await?;
    let (publisher, sample) = (pair.publisher.clone(), chunk(pair, "waiting").await?);
    let waiting =
        tokio::spawn(async move { publisher.publish(vec![sample], publish_options()).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let start = Instant::now();
    pair.publisher.close().await?;
    let result = waiting.await.map_err(|panic| Stop::Failed(format!("publish: {panic}")))?;
    let kinds = &[ErrorKind::Closed, ErrorKind::CapacityExceeded, ErrorKind::Timeout];
    expect_error("a publish that waited while its transport was closed", result, kinds, &[])?;
    let took = start.elapsed();
    ensure!(took < Duration::from_secs(15), "close and the waiting publish took {took:?}");
    drop(full);
    Ok(())
}

/// An eighth of the arena, less the rounding that an allocator may add.
async fn chunk(pair: &Pair, sample: &str) -> Verdict<Publication> {
    let arena = pair.publisher.health().await?.arena_bytes;
    let shape = [arena / CHUNKS - 512];
    let specs: &[Spec<'_>] = &[("x", Dtype::Uint8, &shape)];
    Ok(publication(&key(sample), specs, 1))
}

/// Publishes chunks until no more fits.
async fn fill(pair: &Pair) -> Verdict<Vec<Arc<Descriptor>>> {
    let mut full = Vec::new();
    for index in 0..=CHUNKS {
        let batch = vec![chunk(pair, &format!("chunk {index}")).await?];
        let options = PublishOptions::default().deadline(Duration::from_millis(100));
        match publish_with(pair, batch.clone(), options.clone()).await {
            Ok(published) => full.extend(published),
            Err(_) if index >= CHUNKS / 2 => {
                let result = pair.publisher.publish(batch, options).await;
                let kinds = &[ErrorKind::CapacityExceeded];
                expect_error("publishing into an arena that is nearly full", result, kinds, &[])?;
                return Ok(full);
            }
            Err(stop) => return Err(stop),
        }
    }
    Err(Stop::Failed(format!("more than {CHUNKS} eighths of the arena were published")))
}

fn is_empty(health: &Health) -> bool {
    health.arena_free_bytes == health.arena_bytes
        && health.reserved_bytes == 0
        && health.resident_samples == 0
        && health.resident_bytes == 0
}
