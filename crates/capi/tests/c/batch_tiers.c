/* Tiers below the cache of a batch: prompts that others evict come back, and every refusal.
 *
 *     batch_tiers DIR [disk] [store]: an empty folder, and the tiers that the library was built with.
 */
#include <time.h>
#include "batch.h"

static void pause_ms(long ms) {
    struct timespec time = {.tv_nsec = ms * 1000000};
    nanosleep(&time, NULL);
}

/* Waits until the tiers have what was copied for them. */
static kvist_batch_stats stored(kvist_batch *batch, uint64_t n_blocks) {
    kvist_batch_stats stats;
    for (;;) {
        OK(kvist_batch_describe(batch, &stats));
        if (stats.copied_blocks >= n_blocks && stats.store_bytes == 0) return stats;
        pause_ms(1);
    }
}

#define BLOCKS (PROMPT / 16)

/* A prompt that others evict comes back from a tier, and its text is the same. */
static void comes_back(kvist_batch *batch, const char *tier) {
    uint32_t first[TEXT], again[TEXT];
    MUST(text_of(batch, 0, "ann", first).cached_tokens == 0);
    stored(batch, BLOCKS);
    for (uint32_t i = 1; i < 6; i++) {
        text_of(batch, i, "ann", again);
        stored(batch, BLOCKS * (i + 1));
    }
    kvist_job_info info = text_of(batch, 0, "ann", again);
    MUST(info.cached_tokens == BLOCKS * 16 && info.loaded_tokens[0] == BLOCKS * 16 && info.loaded_tokens[1] == 0);
    MUST(memcmp(first, again, sizeof first) == 0);
    kvist_batch_stats stats;
    OK(kvist_batch_describe(batch, &stats));
    MUST(stats.n_tiers == 1 && strcmp(stats.tiers[0].name, tier) == 0 && stats.loads >= 1 && stats.load_s > 0);
    MUST(stats.tiers[0].loaded_tokens >= BLOCKS * 16 && stats.failed_loads == 0 && stats.tiers[0].errors == 0);
}

static kvist_batch_options tiny(void) {
    /* Room for two prompts. A busy machine is late: wait. */
    return (kvist_batch_options){.k = "f32", .context_tokens = 256, .tier_load_always = true, .tier_grace_ms = 3600000};
}

static void ram(void) {
    for (int back = 0; back < 2; back++) {
        kvist_batch_options options = tiny();
        options.tier_ram_bytes = 64 << 20;
        options.tier_write_back = back;
        if (back) { /* only blocks that are evicted are copied */
            kvist_batch *batch = start(&options);
            uint32_t text[TEXT];
            for (uint32_t i = 0; i < 6; i++) text_of(batch, i, NULL, text);
            MUST(stored(batch, 1).tiers[0].bytes > 0);
            OK(kvist_batch_free(batch));
            continue;
        }
        kvist_batch *batch = start(&options);
        comes_back(batch, "ram");
        kvist_batch_stats stats;
        OK(kvist_batch_describe(batch, &stats));
        MUST(stats.tiers[0].bytes > 0 && stats.tiers[0].capacity_bytes == 64 << 20);
        /* A salt that is forgotten is not loaded. */
        size_t pending = 1;
        while (pending > 0) OK(kvist_batch_forget(batch, "ann", NULL, &pending)); /* it waits two seconds at most */
        uint32_t text[TEXT];
        MUST(text_of(batch, 0, "ann", text).cached_tokens == 0);
        OK(kvist_batch_free(batch));
    }
    kvist_batch_options packed = tiny();
    packed.k = "f16";
    packed.tier_ram_bytes = 1 << 20;
    packed.tier_ram_packed = true;
    kvist_batch *batch = start(&packed);
    uint32_t text[TEXT];
    text_of(batch, 0, NULL, text);
    OK(kvist_batch_free(batch));
    packed.k = "q8";
    EXPECT(kvist_batch_new(model, &packed, &batch), KVIST_INVALID_ARGUMENT, "packs a cache in f16, and this one has q8");
}

static char path[4096];

static void disk(const char *dir, int is_built) {
    snprintf(path, sizeof path, "%s/blocks", dir);
    kvist_batch_options options = tiny();
    options.tier_disk_dir = path;
    kvist_batch *batch = NULL, *other = NULL;
    EXPECT(kvist_batch_new(model, &options, &batch), KVIST_INVALID_ARGUMENT, "tier_disk_bytes is 0");
    options.tier_disk_bytes = 128 << 20;
    if (!is_built) {
        EXPECT(kvist_batch_new(model, &options, &batch), KVIST_UNSUPPORTED, "--features disk-tier");
        MUST(batch == NULL);
        return;
    }
    uint32_t first[TEXT], again[TEXT];
    batch = start(&options);
    comes_back(batch, "disk");
    EXPECT(kvist_batch_new(model, &options, &other), KVIST_BAD_FILE, "tier_disk_dir: ");
    MUST(other == NULL);
    text_of(batch, 0, "ann", first);
    OK(kvist_batch_free(batch));

    /* Another batch finds them, as another process does. */
    batch = start(&options);
    kvist_job_info info = text_of(batch, 0, "ann", again);
    MUST(info.loaded_tokens[0] == BLOCKS * 16 && memcmp(first, again, sizeof first) == 0);
    OK(kvist_batch_free(batch));

    snprintf(path, sizeof path, "%s/file", dir);
    FILE *file = fopen(path, "w");
    MUST(file != NULL && fclose(file) == 0);
    EXPECT(kvist_batch_new(model, &options, &batch), KVIST_BAD_FILE, "tier_disk_dir: ");
    snprintf(path, sizeof path, "%s/small", dir);
    options.tier_disk_bytes = 1 << 20;
    EXPECT(kvist_batch_new(model, &options, &batch), KVIST_BAD_FILE, "tier_disk_dir: ");
}

static void store(const char *dir, int is_built) {
    kvist_batch_options options = tiny();
    options.tier_store = path;
    snprintf(path, sizeof path, "fs://%s/shared", dir);
    kvist_batch *batch = NULL;
    if (!is_built) {
        EXPECT(kvist_batch_new(model, &options, &batch), KVIST_UNSUPPORTED, "--features shared-tier");
        MUST(batch == NULL);
        return;
    }
    batch = start(&options);
    comes_back(batch, "fs");
    kvist_batch_stats stats;
    OK(kvist_batch_describe(batch, &stats));
    MUST(stats.tiers[0].capacity_bytes == KVIST_UNKNOWN);
    /* Two at once share it. */
    kvist_batch *other = start(&options);
    uint32_t text[TEXT];
    MUST(text_of(other, 0, "ann", text).loaded_tokens[0] == BLOCKS * 16);
    OK(kvist_batch_free(other));
    OK(kvist_batch_free(batch));
    snprintf(path, sizeof path, "gopher://nowhere");
    EXPECT(kvist_batch_new(model, &options, &batch), KVIST_INVALID_ARGUMENT, "tier_store: ");
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    int has_disk = 0, has_store = 0;
    for (int i = 2; i < argc; i++) {
        has_disk |= strcmp(argv[i], "disk") == 0;
        has_store |= strcmp(argv[i], "store") == 0;
    }
    begin();
    ram();
    disk(argv[1], has_disk);
    store(argv[1], has_store);
    OK(kvist_model_free(model));
    printf("ok\n");
    return 0;
}
