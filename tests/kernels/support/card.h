// A card over virtual time: streams in order, a copy engine per direction, kernels that share the link with it, a launch
// queue of bounded length, and host threads whose clocks driver calls move. No byte of the engine's pool is touched: only
// memory that the stand-in itself has allocated is truly copied (the kernels' tables). Parameters: card.json.
//
// The link is fluid: what crosses it in one direction at one time shares its rate. A descriptor costs the copy engine a
// fixed time on top. A forward keeps the SMs; a kernel whose CTA does not fit in the registers that it leaves starts
// between two of the forward's kernels.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

struct Card {
    enum Kind { RECORD, WAIT, COPY, KERNEL, FORWARD };
    enum Way { TO_DEVICE, TO_HOST, INSIDE };
    struct Op {
        Kind kind = RECORD;
        Way way = INSIDE;
        double issued = 0, work = 0, rate = 0, not_before = 0;  // work: bytes, or seconds for INSIDE and FORWARD
        double most = 1e30;                                    // a kernel's own rate
        intptr_t event = 0;
        long version = 0, number = 0;
        bool begun = false, shares = true;
        std::function<void()> effect;
        std::function<Way()> decide;
    };
    struct Event { long recorded = 0, passed = 0; };

    bool on = false;
    std::map<std::string, double> p;
    std::map<intptr_t, std::deque<Op>> streams;
    std::map<intptr_t, Event> events;
    std::map<uint64_t, uint64_t> host, own;  // start -> end: host memory; memory of the stand-in's own
    std::vector<double> clocks;
    double now = 0, blocked = 0, forward_began = 0, bytes[3] = {0, 0, 0};
    size_t thread = 0;
    long numbers = 0, calls = 0;

    void reset() {
        on = true, streams.clear(), events.clear(), host.clear(), own.clear();
        clocks.assign(4, 0.0), now = blocked = forward_began = 0, thread = 0, numbers = calls = 0;
        bytes[0] = bytes[1] = bytes[2] = 0;
    }
    static bool within(const std::map<uint64_t, uint64_t>& ranges, uint64_t address) {
        auto next = ranges.upper_bound(address);
        return next != ranges.begin() && address < std::prev(next)->second;
    }
    Way way_of(uint64_t src, uint64_t dst) const {
        return within(host, dst) ? TO_HOST : within(host, src) ? TO_DEVICE : INSIDE;
    }
    double& clock() { return clocks[thread]; }
    void spend(double seconds) {
        if (!on) return;
        ++calls;
        clock() += seconds;
        run_until(clock());
    }
    // A full queue holds the caller until its oldest entry is through.
    void push(intptr_t stream, Op op) {
        auto& queue = streams[stream];
        while (queue.size() >= (size_t)p["queue_entries"]) {
            const double before = std::max(now, clock());
            const size_t length = queue.size();
            run_until(before);
            while (queue.size() >= length) {
                const double next = step();
                if (next >= 1e29) { fprintf(stderr, "the card's queue is stuck\n"); abort(); }
                advance(next);
            }
            clock() = std::max(clock(), now);
            blocked += now - before;
        }
        op.issued = clock(), op.number = ++numbers;
        queue.push_back(std::move(op));
        run_until(clock());
    }
    void record(intptr_t stream, intptr_t event) {
        Op op;
        op.kind = RECORD;
        op.event = event, op.version = ++events[event].recorded;
        push(stream, std::move(op));
    }
    void wait(intptr_t stream, intptr_t event) {
        Op op;
        op.kind = WAIT;
        op.event = event, op.version = events[event].recorded;
        push(stream, std::move(op));
    }
    bool reached(intptr_t event) { return events[event].passed >= events[event].recorded; }

    // Start what can start; the seconds until something ends or begins.
    double step() {
        for (bool again = true; again;) {
            again = false;
            for (auto& [_, queue] : streams) {
                while (!queue.empty() && !queue.front().begun && queue.front().issued <= now + 1e-15) {
                    Op& op = queue.front();
                    if (op.kind == WAIT && events[op.event].passed < op.version) break;
                    if (op.kind == RECORD) events[op.event].passed = std::max(events[op.event].passed, op.version);
                    if (op.kind != WAIT && op.kind != RECORD) break;
                    queue.pop_front(), again = true;
                }
            }
        }
        std::vector<Op*> heads;
        bool engine_taken[3] = {false, false, false}, forward = false;
        double next = 1e30;
        for (auto& [_, queue] : streams) {
            if (queue.empty()) continue;
            Op& op = queue.front();
            if (op.issued > now + 1e-15) { next = std::min(next, op.issued - now); continue; }
            if (op.kind == RECORD || op.kind == WAIT) continue;
            heads.push_back(&op);
            if (op.begun && op.kind == COPY) engine_taken[op.way] = true;
            if (op.kind == FORWARD) {
                forward = true;
                if (!op.begun) forward_began = now;
                op.begun = true;
            }
        }
        std::sort(heads.begin(), heads.end(), [](Op* a, Op* b) { return a->number < b->number; });
        for (Op* op : heads) {
            if (op->begun) continue;
            if (op->kind == COPY && !engine_taken[op->way]) engine_taken[op->way] = op->begun = true;
            if (op->kind == KERNEL) {
                if (op->not_before == 0) {
                    op->not_before = now + p["kernel_start_s"];
                    if (forward && !op->shares) {
                        const double grain = p["forward_kernel_s"];
                        op->not_before = forward_began + std::ceil((now - forward_began) / grain + 1e-9) * grain;
                    }
                }
                if (op->not_before > now + 1e-12) { next = std::min(next, op->not_before - now); continue; }
                op->begun = true;
                if (op->decide) op->way = op->decide();
                if (op->way == INSIDE)
                    op->work /= std::min(p["hbm_bytes_s"] / 2, op->most * p["link_latency_s"] / p["hbm_latency_s"]);
            }
        }
        int users[2] = {0, 0};
        for (Op* op : heads) if (op->begun && op->kind != FORWARD && op->way != INSIDE) ++users[op->way];
        for (int way = 0; way < 2; ++way) {
            if (!users[way]) continue;
            double left = users[1 - way] ? std::min(p["link_bytes_s"], p["duplex_bytes_s"] / 2) : p["link_bytes_s"];
            const double fair = left / users[way], most = left * p["kernel_link_share"];
            Op* copying = nullptr;
            for (Op* op : heads) {
                if (!op->begun || op->kind == FORWARD || op->way != way) continue;
                if (op->kind == COPY) { copying = op; continue; }
                op->rate = std::min({op->most, fair, most});
                left -= op->rate;
            }
            if (copying) copying->rate = left;
        }
        for (Op* op : heads) {
            if (!op->begun) continue;
            if (op->kind == FORWARD || op->way == INSIDE) op->rate = 1;
            next = std::min(next, op->work / op->rate);
        }
        return next;
    }
    void advance(double seconds) {
        now += seconds;
        for (auto& [_, queue] : streams) {
            if (queue.empty() || !queue.front().begun) continue;
            Op& op = queue.front();
            const double done = seconds * op.rate;
            op.work -= done;
            if (op.way != INSIDE && op.kind != FORWARD) bytes[op.way] += done;
            if (op.work > 1e-12 * std::max(1.0, op.rate)) continue;
            if (op.effect) op.effect();
            queue.pop_front();
        }
    }
    void run_until(double time) {
        while (now < time) {
            const double next = step();
            advance(std::min(next, time - now));
        }
        step();
    }
    void copy(intptr_t stream, const uint64_t* dsts, const uint64_t* srcs, const size_t* sizes, size_t count) {
        double total[3] = {0, 0, 0};
        for (size_t i = 0; i < count; ++i) {
            const Way way = way_of(srcs[i], dsts[i]);
            total[way] += (double)sizes[i];
            if (way != INSIDE) total[way] += p["descriptor_s"] * p["link_bytes_s"];
            if (within(own, srcs[i]) && within(own, dsts[i])) memcpy((void*)dsts[i], (void*)srcs[i], sizes[i]);
        }
        for (int way = 0; way < 3; ++way) {
            if (total[way] == 0) continue;
            Op op;
        op.kind = COPY;
            op.way = (Way)way, op.work = way == INSIDE ? 2 * total[way] / p["hbm_bytes_s"] : total[way];
            push(stream, std::move(op));
        }
    }
    // `src` and `dst` are tables of base addresses; `threads` of one CTA.
    void kernel(intptr_t stream, const uint64_t* src, const uint64_t* dst, double nbytes, double ctas, double threads,
                double unit) {
        Op op;
        op.kind = KERNEL;
        op.work = nbytes;
        op.most = ctas * threads * 4 * unit / p["link_latency_s"];
        op.shares = threads * p["kernel_registers"] + p["forward_registers"] <= p["sm_registers"];
        op.decide = [this, src, dst] { return way_of(src[0], dst[0]); };
        push(stream, std::move(op));
    }
    void forward(intptr_t stream, double seconds) {
        Op op;
        op.kind = FORWARD;
        op.work = seconds;
        push(stream, std::move(op));
    }
};

static Card card;

extern "C" {
void card_reset() { card.reset(); }
void card_off() { card.on = false; }
void card_set(const char* name, double value) { card.p[name] = value; }
double card_clock() { return card.clock(); }
double card_blocked() { return card.blocked; }
double card_bytes(int way) { return card.bytes[way]; }
void card_thread(int number) { card.thread = (size_t)number; }
void card_sleep_until(double time) {
    card.clock() = std::max(card.clock(), time);
    card.run_until(card.clock());
}
void card_forward(intptr_t stream, double seconds) { card.forward(stream, seconds); }
int card_idle() {
    for (auto& [_, queue] : card.streams) if (!queue.empty()) return 0;
    return 1;
}
}
