//! Cases about many tasks at once.

use std::sync::Arc;

use tokio::{sync::mpsc, task::JoinSet};

use super::{
    Pair,
    context::{
        PLAIN, Returns, Spec, Stop, Verdict, check_bytes, ensure, fetch_and_check, fetch_one, key,
        publication, publish_options, release_now, settled,
    },
};
use crate::{Descriptor, Destination, Dtype, ErrorKind, FetchRequest};

const PRODUCERS: u64 = 4;
const CONSUMERS: u64 = 4;
const SAMPLES_EACH: u64 = 100;
/// 20 KiB: those under way, up to 24, do not fit the arena, so that producers wait for consumers.
const BIG: &[Spec<'static>] =
    &[("hidden_states", Dtype::Bfloat16, &[10, 1000]), ("input_ids", Dtype::Int64, &[9])];

pub(super) async fn concurrent_tasks_lose_nothing(pair: &mut Pair) -> Verdict {
    let before = pair.publisher.health().await?;
    let views = pair.consumer.info().capabilities.views;
    // Keys come back, as those of retried samples do, where their lives can be told apart.
    let checked = pair.publisher.info().capabilities.staleness_checked
        && pair.consumer.info().capabilities.staleness_checked;
    let keys = if checked { 40 } else { SAMPLES_EACH };
    let (sender, receiver) = mpsc::channel::<(Arc<Descriptor>, u64)>(16);
    let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
    let returns = Returns::default();
    let mut tasks = JoinSet::<Verdict>::new();
    for producer in 0..PRODUCERS {
        let (publisher, sender) = (pair.publisher.clone(), sender.clone());
        tasks.spawn(async move {
            for round in 0..SAMPLES_EACH {
                let key = key(format!("{producer}/{}", round % keys));
                let sample = publication(&key, BIG, round);
                let options = publish_options().replace(true);
                let mut descriptors = publisher.publish(vec![sample], options).await?;
                let descriptor = Arc::new(descriptors.remove(0));
                if sender.send((descriptor, round)).await.is_err() {
                    return Err(Stop::Failed("all consumers ended early".into()));
                }
            }
            Ok(())
        });
    }
    drop(sender);
    for _ in 0..CONSUMERS {
        let (consumer, receiver) = (pair.consumer.clone(), receiver.clone());
        let returns = returns.clone();
        tasks.spawn(async move {
            loop {
                let next = receiver.lock().await.recv().await;
                let Some((descriptor, salt)) = next else { return Ok(()) };
                let destination = match salt % 4 {
                    0 if views => Destination::View,
                    0 | 1 => Destination::Pool,
                    _ => Destination::Into(returns.regions(&descriptor)?),
                };
                let request = FetchRequest::new(descriptor.clone(), destination);
                let fetched = fetch_one(&consumer, request).await?;
                check_bytes(&fetched, salt)?;
                drop(fetched);
                release_now(&consumer, &descriptor).await?;
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|panic| Stop::Failed(format!("a task panicked: {panic}")))??;
    }
    let into = PRODUCERS * SAMPLES_EACH / 2 * BIG.len() as u64;
    returns.reach("after all tasks ended", into as usize).await?;
    let total = PRODUCERS * SAMPLES_EACH;
    settled("published and released agree", &pair.publisher, |h| {
        h.published_samples - before.published_samples == total
            && h.released_samples - before.released_samples == total
            && h.resident_samples == 0
            && h.resident_bytes == 0
            && h.reserved_bytes == 0
            && h.arena_free_bytes == before.arena_free_bytes
    })
    .await?;
    settled("no memory stays in quarantine", &pair.consumer, |h| h.quarantined_bytes == 0).await?;
    Ok(())
}

pub(super) async fn one_of_many_publishers_of_a_key_wins(pair: &mut Pair) -> Verdict {
    for round in 0..10 {
        let mut tasks = JoinSet::new();
        for salt in 0..6 {
            let publisher = pair.publisher.clone();
            let sample = publication(&key(format!("contended {round}")), PLAIN, salt);
            tasks.spawn(
                async move { (salt, publisher.publish(vec![sample], publish_options()).await) },
            );
        }
        let mut winner = None;
        while let Some(ended) = tasks.join_next().await {
            let (salt, result) =
                ended.map_err(|panic| Stop::Failed(format!("a task panicked: {panic}")))?;
            match result {
                Ok(mut descriptors) => {
                    ensure!(winner.is_none(), "two publishers of one key succeeded");
                    winner = Some((salt, Arc::new(descriptors.remove(0))));
                }
                Err(error) => ensure!(
                    error.kind() == ErrorKind::AlreadyExists,
                    "a publisher of a contended key fails with {error}"
                ),
            }
        }
        let Some((salt, descriptor)) = winner else {
            return Err(Stop::Failed("no publisher of the key succeeded".into()));
        };
        fetch_and_check(&pair.consumer, &descriptor, salt).await?;
        release_now(&pair.consumer, &descriptor).await?;
    }
    settled("nothing is left", &pair.publisher, |h| h.resident_samples == 0).await?;
    Ok(())
}

pub(super) async fn concurrent_releases_count_once(pair: &mut Pair) -> Verdict {
    let batch = (0..32).map(|i| publication(&key(i), PLAIN, 1)).collect();
    let descriptors = pair.publisher.publish(batch, publish_options()).await?;
    let descriptors: Vec<_> = descriptors.into_iter().map(Arc::new).collect();
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let consumer = pair.consumer.clone();
        let releases = descriptors.iter().map(|d| d.clone().into()).collect();
        tasks.spawn(async move { consumer.release(releases).await });
    }
    let mut sum = crate::ReleaseReport::default();
    while let Some(ended) = tasks.join_next().await {
        sum.merge(ended.map_err(|panic| Stop::Failed(format!("a task panicked: {panic}")))??);
    }
    ensure!(
        sum.released == 32 && sum.already_gone == 96 && sum.stale == 0,
        "32 samples were released 4 times each: {sum:?}"
    );
    settled("nothing is left", &pair.publisher, |h| h.resident_samples == 0).await?;
    Ok(())
}
